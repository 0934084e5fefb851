"""What an error of the system means: a mistake, a file system that fails, or one that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.errors import ExitCode, StorageFailed, StorageFull, UsageError, unusable


@pytest.mark.parametrize(
    ("number", "kind", "code", "advice"),
    [
        (errno.ENOSPC, StorageFull, 74, "; make room, then start again"),
        (errno.EDQUOT, StorageFull, 74, "; make room, then start again"),
        (errno.ESTALE, StorageFailed, 74, "; start again when that works"),
        (errno.EACCES, UsageError, 2, "; choose another path, or correct this one"),
    ],
)
def test_an_error_is_told_by_its_number(number: int, kind: type, code: int, advice: str) -> None:
    error = unusable("it failed", OSError(number, "failed"))
    assert type(error) is kind and error.exit_code is ExitCode(code) and str(error) == f"it failed{advice}"


def test_a_file_system_without_inodes_has_room_that_helps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`df` shows free space then, and the message said to make room."""
    missing = str(tmp_path / "run" / "logs")
    assert "make room" in str(unusable("x", OSError(errno.ENOSPC, "No space left", missing)))
    full = SimpleNamespace(f_files=100, f_favail=0, f_bavail=5000)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert "no inode is free (df -i): remove files" in str(
        unusable("x", OSError(errno.ENOSPC, "No space left", missing))
    )
    # File systems without a table of inodes, such as btrfs, report none.
    full.f_files = 0
    assert "make room" in str(unusable("x", OSError(errno.ENOSPC, "No space left", missing)))
