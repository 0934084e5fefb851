from __future__ import annotations

from pathlib import Path

import pytest
from integration.support import SHORT_JOB, Run


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbs; all others must end like it."""
    run = Run(Path(tmp_path_factory.mktemp("untouched")) / "run", *SHORT_JOB).start()
    assert run.finish() == 0, run.output
    return run
