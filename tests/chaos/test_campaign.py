"""`runner chaos` as a user types it: a correct product passes, a broken one is detected."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import Server, bucket_on
from integration.support import RUNNER, SHORT_JOB

# A campaign waits up to two minutes for the consequences of each fault.
pytestmark = pytest.mark.timeout(1800)

SHORT = ["--set", "trainer.max_steps=30"]
# None of the faults that these choose stops a rank: one that stands still stands in for nothing but a busy machine.
PATIENT = ["--set", "restart.hang_timeout_s=120"]


def chaos(folder: Path, *options: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the verdict and the output."""
    verdict = folder / "verdict.json"
    folders = ["--output-dir", str(folder / "chaos"), "--json", str(verdict)]
    done = subprocess.run(
        [*RUNNER, "chaos", *SHORT_JOB, *PATIENT, *folders, *options],
        capture_output=True,
        text=True,
        timeout=1700,
        env={**os.environ, **environment},
        cwd=folder,
    )
    # The last line is the verdict's, whatever warnings there were.
    return done.returncode, json.loads(verdict.read_text()) if verdict.exists() else {}, done.stderr + done.stdout


def sabotaged(folder: Path, module: str, change: str) -> str:
    """A PYTHONPATH under which every Python process runs `change` on that module as soon as it is imported."""
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import importlib.abc, importlib.machinery, sys
            class Saboteur(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path, target=None):
                    if name != {module!r}:
                        return None
                    spec = importlib.machinery.PathFinder.find_spec(name, path)
                    execute = spec.loader.exec_module
                    def execute_and_change(module):
                        execute(module)
                        exec({textwrap.dedent(change)!r}, {{"module": module}})
                    spec.loader.exec_module = execute_and_change
                    return spec
            sys.meta_path.insert(0, Saboteur())
            """
        )
    )
    return f"{folder}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")


@pytest.mark.soak
def test_nothing_is_lost(tmp_path: Path) -> None:
    names = ["rank killed", "agent killed", "preempted", "killed at local.manifest", "disk full", "NaN in a batch"]
    names += ["clock jumps by an hour", "memory pressure"]
    options = [part for name in names for part in ("--fault", name)]
    code, verdict, output = chaos(tmp_path, "--kills", "8", "--seed", "7", *options)
    assert code == 0, output
    assert verdict["faults"] >= 8 and verdict["violations"] == 0 and verdict["identical"], output
    assert "bit-identical to the fault-free run" in output.splitlines()[-1]
    assert not list((tmp_path / "chaos").glob("run-*")), "folders of runs that ended well are removed"


def test_two_faults_of_a_short_job_lose_nothing(tmp_path: Path) -> None:
    """The campaign of the default tiers: all faults are in `soak`, and each kind of death in tests/integration."""
    names = [part for name in ("rank killed", "supervisor killed") for part in ("--fault", name)]
    # Its path is short enough for sockets.
    with tempfile.TemporaryDirectory() as temporary:
        code, verdict, output = chaos(
            tmp_path, "--kills", "2", "--seed", "7", *SHORT, *names, TMPDIR=temporary, XDG_RUNTIME_DIR=temporary
        )
        assert not list(Path(temporary).iterdir()), "temporary files, also of a runner that was killed, are removed"
    assert code == 0, output
    assert verdict["faults"] >= 2 and verdict["violations"] == 0 and verdict["identical"], output
    assert "bit-identical to the fault-free run" in output.splitlines()[-1]
    assert not list((tmp_path / "chaos").glob("run-*")), "folders of runs that ended well are removed"


def test_a_program_of_the_users_own_is_disturbed_and_nothing_of_theirs_is_touched(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs/examples/hf_trainer.py"
    (tmp_path / "train.py").write_bytes(script.read_bytes())
    names = [part for name in ("rank killed", "preempted") for part in ("--fault", name)]
    options = ["--nproc-per-node", "2", "--steps", "30", "--kills", "2", "--seed", "7", "--output-dir", "chaos"]
    command = [*RUNNER, "chaos", *options, *PATIENT, *names, "train.py", "own-folder"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs of 30 steps" in done.stdout and "bit-identical to the fault-free run" in done.stdout.splitlines()[-1]
    # The folder is made by the Trainer's constructor; nothing is written to it.
    assert not list((tmp_path / "own-folder").iterdir())


@pytest.mark.soak
def test_a_checkpoint_manager_that_forgets_the_generators_is_found(tmp_path: Path) -> None:
    """Dropout then falls otherwise after each restart from a checkpoint: the bits differ, and nothing else does."""
    path = sabotaged(tmp_path, "checkpointing.process.rng", "module.set_state = lambda *args, **kwargs: None")
    code, verdict, output = chaos(
        tmp_path, "--kills", "2", "--seed", "1", "--fault", "killed at local.committed", PYTHONPATH=path
    )
    assert code == 1, output
    assert verdict["faults"] >= 2 and verdict["violations"] == 0 and not verdict["identical"]
    assert "DIFFERENT" in output and "model.safetensors" in output and "Traceback" not in output
    assert list((tmp_path / "chaos").glob("run-*/journal.jsonl")), "the folders are kept"


@pytest.mark.soak
def test_an_agent_that_lies_about_its_commits_is_found(tmp_path: Path) -> None:
    """The product reports a commit, and removes the checkpoint that it has written."""
    path = sabotaged(
        tmp_path,
        "checkpointing.commit.protocol",
        """
        commit = module.commit_snapshot
        def lie(storage, info, *args, **kwargs):
            result = commit(storage, info, *args, **kwargs)
            if info.step < 60:
                storage.remove(info.step)
            return result
        module.commit_snapshot = lie
        """,
    )
    code, verdict, output = chaos(
        # This seed injects its fault in mid-training.
        tmp_path,
        "--kills",
        "1",
        "--seed",
        "4",
        "--fault",
        "preempted",
        PYTHONPATH=path,
    )
    assert code == 1, output
    # The journal knows of it, so the runner itself refuses to start from the beginning.
    assert verdict["violations"] > 0 and "holds no checkpoint, but this run's journal says that step" in output


@pytest.mark.soak
def test_a_job_that_is_not_deterministic_is_told_as_that(tmp_path: Path) -> None:
    path = sabotaged(
        tmp_path,
        "runner.training.model",
        """
        import os, pathlib, torch
        build = module.build
        def built(*args, **kwargs):
            model, tokenizer = build(*args, **kwargs)
            # The same for all ranks of this run, and no other: reference, run-1, reference-again.
            factor = 1 + 1e-6 * len(pathlib.Path(os.environ["TMPDIR"]).parent.name)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            return model, tokenizer
        module.build = built
        """,
    )
    code, verdict, output = chaos(
        tmp_path, "--kills", "1", "--seed", "1", "--fault", "rank killed", *SHORT, PYTHONPATH=path
    )
    assert code == 0, output
    assert verdict["nondeterministic"] and not verdict["identical"] and verdict["violations"] == 0
    assert "the job is nondeterministic" in output and "DIFFERENT" not in output


@pytest.mark.soak
def test_half_a_micro_batch_is_compared_within_a_tolerance(tmp_path: Path) -> None:
    code, verdict, output = chaos(tmp_path, "--kills", "1", "--seed", "1", "--fault", "out of memory", *SHORT)
    assert code == 0, output
    assert verdict["faults"] == verdict["runs_halved_within_tolerance"] == 1


@pytest.mark.soak
def test_on_s3(radosgw_s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_on(radosgw_s3, monkeypatch)
    names = ["S3 answers 503", "S3 breaks connections", "supervisor killed", "killed at remote.publishing"]
    options = [part for name in names for part in ("--fault", name)]
    location = f"checkpoint.location=s3://{bucket}/run"
    code, verdict, output = chaos(tmp_path, "--kills", "3", "--seed", "5", "--set", location, *options)
    assert code == 0, output
    assert verdict["faults"] >= 3 and verdict["violations"] == 0 and verdict["identical"], output
    assert len({injection["fault"] for injection in verdict["injections"]} & set(names)) >= 2, output


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    code, _, output = chaos(tmp_path, "--fault", "meteorite")
    assert code == 2 and "'meteorite'" in output and "--list" in output and "Traceback" not in output
    (tmp_path / "chaos").mkdir(exist_ok=True)
    (tmp_path / "chaos" / "mine").touch()
    code, _, output = chaos(tmp_path)
    assert code == 2 and "is not empty" in output
