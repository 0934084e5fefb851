from __future__ import annotations

from pathlib import Path

import pytest
from integration.support import SHORT_JOB, Run, script


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbs; all others must end like it."""
    run = Run(Path(tmp_path_factory.mktemp("untouched")) / "run", *SHORT_JOB).start()
    assert run.finish() == 0, run.output
    return run


@pytest.fixture(scope="session")
def untouched_script(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Likewise, of the user's script."""
    folder = Path(tmp_path_factory.mktemp("untouched-script"))
    run = Run(folder / "run", script=script(folder)).start()
    assert run.finish() == 0, run.output
    assert "script finished on rank 0" in run.output and "script finished on rank 1" in run.output
    return run
