from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from integration.support import SHORT_JOB, Run, script


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbs; all others must end like it."""
    return finished_once(shared_folder(tmp_path_factory) / "untouched", *SHORT_JOB)


@pytest.fixture(scope="session")
def untouched_script(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Likewise, of the user's script."""
    folder = shared_folder(tmp_path_factory) / "untouched-script"
    folder.mkdir(exist_ok=True)
    run = finished_once(folder / "run", script=script(folder))
    assert "script finished on rank 0" in run.output and "script finished on rank 1" in run.output
    return run


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all workers of `pytest -n`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def finished_once(folder: Path, *options: str, script: list[str] | None = None) -> Run:
    """A run by whichever worker needs it first; the others wait for it."""
    run, output = Run(folder, *options, script=script), folder.with_name(f"{folder.name}.output")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            run.output = output.read_text()
        else:
            assert run.start().finish() == 0, run.output
            output.write_text(run.output)
    return run
