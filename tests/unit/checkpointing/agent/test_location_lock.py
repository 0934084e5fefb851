"""One agent at a time writes to a directory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from checkpointing.agent.location_lock import acquire_lock
from checkpointing.locking import this_machine


def test_a_directory_that_cannot_be_written_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    """As a disk that is mounted read-only while a killed agent is replaced."""
    in_the_way, waits = tmp_path / "disk", list[float]()
    in_the_way.touch()
    with pytest.raises(NotADirectoryError):
        acquire_lock(in_the_way / "checkpoints", 0.0)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            in_the_way.unlink()

    with pytest.raises(NotADirectoryError):
        acquire_lock(in_the_way / "checkpoints", 0.0, patience_s=1.0, wait=wait)
    os.close(acquire_lock(in_the_way / "checkpoints", 0.0, patience_s=1.0, wait=wait))
    assert waits == [0.5] * 3


@pytest.mark.parametrize(("machine", "taken"), [("another-machine", True), (this_machine(), False)])
def test_a_lock_that_another_machine_keeps_is_left_to_the_fence(tmp_path: Path, machine: str, taken: bool) -> None:
    """A node that was given up goes on; its lock must not keep the run from going on elsewhere."""
    first = acquire_lock(tmp_path, 0.0)
    os.truncate(first, 0)
    os.pwrite(first, f"pid 7 on {machine}\n".encode(), 0)
    if not taken:
        with pytest.raises(TimeoutError, match="stop that run"):
            acquire_lock(tmp_path, 0.1)
        os.close(first)
        return
    second = acquire_lock(tmp_path, 0.1)
    assert os.pread(second, 100, 0) == f"pid 7 on {machine}\n".encode()
    os.close(first)
    # It becomes ours as soon as that one is gone.
    deadline = time.monotonic() + 120
    while str(os.getpid()).encode() not in os.pread(second, 100, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        acquire_lock(tmp_path, 0.0)
    os.close(second)
