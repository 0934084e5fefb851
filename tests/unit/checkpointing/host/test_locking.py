"""A lock that says who holds it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from checkpointing.host.locking import held_by, holder, is_elsewhere, open_lock, this_machine, try_lock, wait_for_lock


def test_one_holder_at_a_time_and_its_name(tmp_path: Path) -> None:
    first, second = open_lock(tmp_path / "lock"), open_lock(tmp_path / "lock")
    assert holder(first) == "unknown"
    assert try_lock(first) and not try_lock(second)
    assert holder(second) == f"pid {os.getpid()} on {this_machine()}"
    os.close(first)
    assert try_lock(second)
    os.close(second)


def test_a_lock_is_taken_as_soon_as_it_is_free(tmp_path: Path) -> None:
    first, second = open_lock(tmp_path / "lock"), open_lock(tmp_path / "lock")
    assert try_lock(first)
    waiter = threading.Thread(target=wait_for_lock, args=(second,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    os.close(first)
    waiter.join(60)
    assert not waiter.is_alive()
    os.close(second)


def test_a_holder_is_here_or_on_another_machine() -> None:
    assert not is_elsewhere(f"pid 7 on {this_machine()}")
    assert is_elsewhere("pid 7 on another (boot 1)")
    assert not is_elsewhere("unknown")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_who_shares_a_folder_shares_its_locks(umask: int, mode: int, tmp_path: Path) -> None:
    """Another user of the group could not continue a run: its locks were 0644 whatever the umask said."""
    before = os.umask(umask)
    try:
        os.close(open_lock(tmp_path / "lock"))
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == mode


def test_who_holds_a_lock_is_seen_without_touching_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert held_by(path) is None
    fd = open_lock(path)
    assert held_by(path) is None
    assert try_lock(fd)
    before = path.stat()
    assert held_by(path) == f"pid {os.getpid()} on {this_machine()}"
    # The name of a holder that has ended, or is elsewhere, stays in the file.
    os.close(fd)
    other = open_lock(tmp_path / "other")
    assert try_lock(other)
    assert held_by(path) is None and path.stat() == before
    os.close(other)
