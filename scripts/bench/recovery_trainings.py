"""The trainings of `recovery.py`: the bundled job under `runner start`, and its plain script under what restarts it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common import ROOT
from training_run import TrainingRun

from runner.chaos.run_under_test import runner_command

HERE = Path(__file__).parent
FT_FOLDER = ROOT / ".bench" / "ft"
FT_PACKAGES = ["nvidia-resiliency-ext==0.4.1", "nvidia-ml-py==13.615.71", "defusedxml==0.7.1"]
FT_MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

METHODS = {
    "ours": "`runner start`",
    "loop": "bash loop around `torchrun`",
    "torchrun": "`torchrun --max-restarts=3`, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    "as_is": "`torchrun --max-restarts=3`, as it is",
    "ft": "`ft_launcher --max-restarts=3`",
}
# Not part of a figure: measured in every third round only.
FOR_INFORMATION = ("as_is", "ft")
# No GPU, and one thread for each rank.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# So long that no kill comes after its end; every step is reported, by all methods.
JOB = ("trainer.logging_steps=1", "trainer.num_train_epochs=60")
SAVE_STEPS = 20
NUM_RANKS = 2
# A training that has not finished a step this long after a kill hangs.
RECOVERY_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0


class Trainings:
    """Starts one training at a time, each in a folder of its own.

    Args:
        scratch: Folder for the runs.
        ft_site: Where `ft_launcher` can be imported from; None leaves it out.
    """

    def __init__(self, scratch: Path, ft_site: Path | None) -> None:
        self._scratch, self._ft_site = scratch, ft_site

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        # A short name: a socket's path has 107 bytes at most.
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder / "r"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def start(self, method: str) -> Iterator[TrainingRun]:
        """Run the bundled job under a method until the block ends."""
        with self.folder() as folder:
            script = [str(HERE / "recovery_peer.py"), str(folder), *JOB]
            launch = ["--standalone", "--nproc-per-node", str(NUM_RANKS)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *launch]
            environment = ENVIRONMENT
            match method:
                case "ours":
                    command = ours(folder, *JOB)
                case "loop":
                    command = ["bash", "-c", 'until "$@"; do :; done', "loop", *torchrun, *script]
                case "torchrun" | "as_is":
                    command = [*torchrun, "--max-restarts", "3", *script]
                    environment = ENVIRONMENT | (SHARED_STORE_OFF if method == "torchrun" else {})
                case _:
                    command = [sys.executable, "-m", FT_MODULE, *launch, "--max-restarts", "3"]
                    command += ["--ignore-missing-fault-tol-cfg", *script]
                    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{self._ft_site}"}
            with TrainingRun(command, folder, environment) as training:
                yield training

    @contextlib.contextmanager
    def start_ours(self, folder: Path, *settings: str, script: Sequence[str] = ()) -> Iterator[TrainingRun]:
        """Run `runner start` with these settings, or with a script, in a folder that `folder` made."""
        with TrainingRun(ours(folder, *settings, script=script), folder, ENVIRONMENT) as training:
            yield training


class Findings:
    """What went wrong in runs of ours.

    Attributes:
        hangs: Kills after which there was no progress.
        orphans: Processes that outlived their run.
        problems: Everything else.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.hangs: list[str] = []
        self.orphans: list[str] = []
        self.problems: list[str] = []

    def problem(self, text: str, training: TrainingRun) -> None:
        self.problems.append(text)
        self._say(f"WRONG: {text}; its output ends with:\n{training.tail(1000)}")

    def check_leftovers(self, training: TrainingRun) -> None:
        """Note the processes that are left of a run that has ended."""
        for left in training.leftovers():
            self.orphans.append(left)
            self._say(f"LEFT: {left}")

    def hang(self, text: str, training: TrainingRun) -> None:
        """Note a run without progress: it waits for ever, or it has given up, which is as bad."""
        code = training.process.poll()
        text += "; the supervisor " + ("is alive" if code is None else f"ended with exit code {code}")
        self.hangs.append(text)
        entries = [json.dumps(entry.to_dict()) for entry in training.journal()[-8:]]
        self._say(f"HANG: {text}\n{training.tail(1000)}\n" + "\n".join(entries))
        if code is not None:
            self.check_leftovers(training)


def ours(folder: Path, *settings: str, script: Sequence[str] = ()) -> list[str]:
    """Return the command `runner start` with two ranks."""
    options = [part for setting in settings for part in ("--set", setting)]
    return runner_command(folder, "--nproc-per-node", str(NUM_RANKS), *options, script=script)


def find_ft_site() -> Path | None:
    """Return where `ft_launcher` can be imported from, with the installed torch; None, with the reason, if it cannot.

    It is installed on first use.
    """
    if not (FT_FOLDER / "ready").exists():
        print(f"first use: installing {FT_PACKAGES[0]} into {FT_FOLDER.relative_to(ROOT)}", file=sys.stderr)
        shutil.rmtree(FT_FOLDER, ignore_errors=True)
        # Without dependencies: torch is installed, and so is everything else but these.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FT_FOLDER)]
        result = subprocess.run([*install, *FT_PACKAGES], capture_output=True, text=True, timeout=600)
        if result.returncode != 0:
            print(f"ft_launcher is left out, it cannot be installed: {result.stderr[-500:]}", file=sys.stderr)
            return None
        (FT_FOLDER / "ready").touch()
    environment = {**os.environ, "PYTHONPATH": str(FT_FOLDER)}
    result = subprocess.run(
        [sys.executable, "-c", f"import {FT_MODULE}"], capture_output=True, text=True, env=environment, timeout=120
    )
    if result.returncode != 0:
        print(f"ft_launcher is left out, it cannot be imported: {result.stderr[-500:]}", file=sys.stderr)
        return None
    return FT_FOLDER
