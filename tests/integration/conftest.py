from __future__ import annotations

import pytest
from integration.support import SHORT_JOB, Run, finished_once, script, shared_folder


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbs; all others must end like it."""
    return finished_once(shared_folder(tmp_path_factory) / "untouched", *SHORT_JOB)


@pytest.fixture(scope="session")
def untouched_script(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Likewise, of the user's script."""
    folder = shared_folder(tmp_path_factory) / "untouched-script"
    run = finished_once(folder / "run", script=lambda: script(folder))
    assert "script finished on rank 0" in run.output and "script finished on rank 1" in run.output
    return run
