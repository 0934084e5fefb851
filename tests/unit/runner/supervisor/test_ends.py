"""Ends of a run that no attempt has caused."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from checkpointing.storage import open_storage
from runner.errors import CheckpointsMissing, ExitCode, RunnerError, UsageError
from runner.supervisor.ends import end_of_error, end_without_location


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [
        (UsageError("use --nnodes"), ExitCode.USAGE, "use --nnodes"),
        (CheckpointsMissing("holds no checkpoint"), CheckpointsMissing.exit_code, "holds no checkpoint"),
        # A full disk may have room again, or another node may have some: not the error of this run.
        (
            OSError(errno.ENOSPC, "No space left", "/run/x"),
            ExitCode.BUDGET_SPENT,
            "system error: /run/x: No space left",
        ),
        (OSError("odd"), ExitCode.BUDGET_SPENT, "system error: odd"),
    ],
)
def test_errors_outside_of_attempts(error: RunnerError | OSError, exit_code: ExitCode, reason: str) -> None:
    end = end_of_error(error)
    assert (end.exit_code, end.reason) == (exit_code, reason)


def test_a_location_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    assert end_without_location(storage, 3) is None
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    end = end_without_location(storage, 3)
    assert end is not None and end.exit_code is ExitCode.STORAGE_FAILED
    assert "existed when attempt 3 began and is gone; put it back" in end.reason


def test_object_storage_is_never_gone() -> None:
    assert end_without_location(open_storage("memory://bucket/run"), 3) is None
