"""One agent at a time writes to a directory."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpointing.agent import location_lock
from checkpointing.agent.location_lock import acquire_lock
from checkpointing.host import locking
from checkpointing.host.locking import this_machine


@pytest.mark.parametrize("refuses", ["open_lock", "try_lock"])
def test_a_directory_that_cannot_be_written_for_a_moment_is_tried_again(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a disk that is mounted read-only while a killed agent is replaced."""
    answers, waits = [OSError(errno.EROFS, "Read-only file system")] * 4, list[float]()
    plain = getattr(locking, refuses)

    def refuse(argument: Any) -> Any:
        if answers:
            raise answers.pop()
        return plain(argument)

    monkeypatch.setattr(locking, refuses, refuse)
    with pytest.raises(OSError, match="Read-only"):
        acquire_lock(tmp_path, 0.0)
    assert not capsys.readouterr().err
    before = psutil.Process().num_fds()
    fd = acquire_lock(tmp_path, 0.0, patience_s=60.0, wait=waits.append)
    assert waits == [0.5] * 3 and psutil.Process().num_fds() == before + 1
    assert capsys.readouterr().err == (
        f"checkpoint agent: {tmp_path} cannot be written (Read-only file system); trying again for 60 s\n"
    )
    with pytest.raises(TimeoutError):
        acquire_lock(tmp_path, 0.0)
    os.close(fd)


def test_a_mistake_in_the_path_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        acquire_lock(tmp_path / "file" / "checkpoints", 0.0, patience_s=60.0)


def test_a_wait_for_another_agent_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(location_lock, "_SILENCE_S", 0.01)
    fd = acquire_lock(tmp_path, 0.0)
    with pytest.raises(TimeoutError):
        acquire_lock(tmp_path, 0.2)
    os.close(fd)
    told = capsys.readouterr().err
    assert told.startswith(f"checkpoint agent: waiting for another one (pid {os.getpid()} on ")
    assert told.endswith(f", which writes to {tmp_path}; for 0 s at most\n") and told.count("\n") == 1


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
