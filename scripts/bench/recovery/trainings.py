"""The bundled job under `runner start`, and its plain script under what restarts it, and what went wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from library.benchmark import BENCH, ROOT
from library.figures import Samples
from library.measuring import scratch_folder
from library.training_run import TrainingRun, start_command
from library.workers import SHARED_STORE_OFF, TORCHRUN, WITHOUT_GPU

HERE = BENCH / "recovery"
FT_FOLDER = ROOT / ".bench" / "ft"
FT_PACKAGES = ["nvidia-resiliency-ext==0.4.1", "nvidia-ml-py==13.615.71", "defusedxml==0.7.1"]
FT_MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"

METHODS = {
    "ours": "`runner start`",
    "loop": "bash loop around `torchrun`",
    "torchrun": "`torchrun --max-restarts=3`, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    "as_is": "`torchrun --max-restarts=3`, as it is",
    "ft": "`ft_launcher --max-restarts=3`",
}
# Not part of a figure: measured in every third round only.
FOR_INFORMATION = ("as_is", "ft")
# So long that no kill comes after its end; every step is reported, by all methods.
JOB = ("trainer.logging_steps=1", "trainer.num_train_epochs=60")
SAVE_STEPS = 20
NUM_RANKS = 2
# A training that has not finished a step this long after a kill hangs.
RECOVERY_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0


class Trainings:
    """Starts one training at a time, each in a folder of its own, and keeps what is found out.

    Attributes:
        measured: Seconds of `recovery_s`, by method, where a hang counts with the limit; of `preempt_s` and its
            `commit_s`; of a step in `pairs`, with supervision and without; and the shares of a step, `overhead`.
        kills: Their number, by moment and by victim.
        hangs: Kills of ours after which there was no progress.
        orphans: Processes that outlived a run of ours.
        problems: What else was wrong.
    """

    def __init__(self, scratch: Path, ft_site: Path | None, say: Callable[[str], None]) -> None:
        self.scratch, self._ft_site, self.say = scratch, ft_site, say
        self.measured, self.kills = Samples(list), Counter[str]()
        self.hangs, self.orphans, self.problems = list[str](), list[str](), list[str]()

    @contextlib.contextmanager
    def start(self, method: str) -> Iterator[TrainingRun]:
        """Run the bundled job under a method until the block ends."""
        if method == "ours":
            with self.start_ours(*JOB) as training:
                yield training
            return
        with scratch_folder(self.scratch) as scratch:
            folder = scratch / "r"
            launch = ["--standalone", "--nproc-per-node", str(NUM_RANKS)]
            if method != "loop":
                launch += ["--max-restarts", "3"]
            command = [*TORCHRUN, *launch]
            environment = WITHOUT_GPU | (SHARED_STORE_OFF if method == "torchrun" else {})
            if method == "loop":
                command = ["bash", "-c", 'until "$@"; do :; done', "loop", *command]
            elif method == "ft":
                command = [sys.executable, "-m", FT_MODULE, *launch, "--ignore-missing-fault-tol-cfg"]
                environment |= {"PYTHONPATH": f"{WITHOUT_GPU['PYTHONPATH']}:{self._ft_site}"}
            with TrainingRun([*command, str(HERE / "peer.py"), str(folder), *JOB], folder, environment) as training:
                yield training

    @contextlib.contextmanager
    def start_ours(self, *settings: str, script: Sequence[str] = ()) -> Iterator[TrainingRun]:
        """Run `runner start` with these settings, or with a script."""
        with scratch_folder(self.scratch) as scratch:
            folder = scratch / "r"
            command = start_command(folder, "--nproc-per-node", str(NUM_RANKS), settings=settings, script=script)
            with TrainingRun(command, folder, WITHOUT_GPU) as training:
                yield training

    def problem(self, text: str, training: TrainingRun) -> None:
        self.problems.append(text)
        self.say(f"WRONG: {text}; its output ends with:\n{training.tail(1000)}")

    def check_leftovers(self, training: TrainingRun) -> None:
        """Note the processes that are left of a run that has ended."""
        for left in training.leftovers():
            self.orphans.append(left)
            self.say(f"LEFT: {left}")

    def hang(self, text: str, training: TrainingRun) -> None:
        """Note a run without progress: it waits for ever, or it has given up, which is as bad."""
        code = training.process.poll()
        text += "; the supervisor " + ("is alive" if code is None else f"ended with exit code {code}")
        self.hangs.append(text)
        entries = [json.dumps(entry.to_dict()) for entry in training.journal()[-8:]]
        self.say(f"HANG: {text}\n{training.tail(1000)}\n" + "\n".join(entries))
        if code is not None:
            self.check_leftovers(training)


def find_ft_site() -> Path | None:
    """Return where `ft_launcher` can be imported from, installed on first use; None if it cannot, with the reason."""
    if not (FT_FOLDER / "ready").exists():
        print(f"first use: installing {FT_PACKAGES[0]} into {FT_FOLDER.relative_to(ROOT)}", file=sys.stderr)
        shutil.rmtree(FT_FOLDER, ignore_errors=True)
        # Without dependencies: torch is installed, and so is everything else but these.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FT_FOLDER)]
        if not _succeeds([*install, *FT_PACKAGES], "installed"):
            return None
        (FT_FOLDER / "ready").touch()
    return FT_FOLDER if _succeeds([sys.executable, "-c", f"import {FT_MODULE}"], "imported") else None


def _succeeds(command: Sequence[str], what: str) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(FT_FOLDER)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if result.returncode != 0:
        print(f"ft_launcher is left out, it cannot be {what}: {result.stderr[-500:]}", file=sys.stderr)
    return result.returncode == 0
