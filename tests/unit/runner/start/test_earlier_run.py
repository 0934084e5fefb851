"""An earlier run is moved aside, or refused; that `--overwrite` does so is in test_boot.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.errors import UsageError
from runner.journal.run_directory import RunDirectory
from runner.start.earlier_run import move_aside


class Remote:
    """An object store with checkpoints of these steps."""

    location, root = "s3://bucket/run", None

    def __init__(self, *steps: int) -> None:
        self._steps, self.sidecars = list(steps), self
        self.state: bytes | None = b'{"failures": 3}'

    def steps(self) -> list[int]:
        return self._steps

    def read_restart_state(self) -> bytes | None:
        return self.state

    def write_restart_state(self, data: bytes) -> None:
        self.state = data


def start_over(store: Remote, directory: RunDirectory, *, overwrite: bool) -> bool:
    config: Any = SimpleNamespace(tiers=SimpleNamespace(nearest_first=[store], durable=store))
    return move_aside(config, directory, overwrite=overwrite)


def test_an_object_store_cannot_move_checkpoints(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    directory.create()
    with pytest.raises(UsageError, match="an object store cannot move them"):
        start_over(Remote(5), directory, overwrite=True)


def test_failures_of_another_run_do_not_count(tmp_path: Path) -> None:
    directory, store = RunDirectory(str(tmp_path / "run")), Remote()
    directory.create()
    assert not start_over(store, directory, overwrite=False)
    assert store.state == b"{}"
