"""Checkpoints in a directory: what a failed save leaves behind. The contract is in tests/contract."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage import LocalStorage


@pytest.mark.parametrize(("notes", "remains"), [(1, False), (4, False), (9, True)])
def test_a_note_that_comes_while_a_save_is_removed(
    notes: int, remains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another node; if it does not stop writing, the sweep of the next attempt removes what is there."""
    transaction = LocalStorage(tmp_path).begin(3, 1)
    (temporary,) = tmp_path.iterdir()
    real, left = os.rmdir, [notes]

    def rmdir(path: Any, *rest: Any, **where: Any) -> None:
        if left[0]:
            left[0] -= 1
            (temporary / f"note-{left[0]}").touch()
        real(path, *rest, **where)

    monkeypatch.setattr(os, "rmdir", rmdir)
    transaction.abort()
    assert temporary.exists() is remains


def test_a_volume_may_give_what_is_made_to_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS with all_squash, CIFS and FUSE do."""
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    transaction = LocalStorage(tmp_path).begin(5, 1, "abc", continues=True)
    transaction.write("file", [memoryview(b"whole")])
    assert transaction.written() == {"file": 5}


def test_what_another_user_has_begun_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in there would lead the files elsewhere."""
    storage = LocalStorage(tmp_path / "run")
    first = storage.begin(5, 1, "abc", continues=True)
    first.write("file", [memoryview(b"whole")])
    assert storage.begin(5, 1, "abc", continues=True).written() == {"file": 5}
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(OSError, match="another user has begun it"):
        storage.begin(5, 1, "abc", continues=True)
    monkeypatch.undo()
    planted = tmp_path / "elsewhere"
    planted.mkdir()
    (tmp_path / "run" / ".checkpoint-6.abc.1.tmp").symlink_to(planted)
    with pytest.raises(OSError, match="another user has begun it"):
        storage.begin(6, 1, "abc", continues=True)


def test_only_whole_files_are_continued(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    folder = tmp_path / "run" / ".checkpoint-5.abc.1.tmp"

    def broken() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        storage.begin(5, 1, "abc", continues=True).write("sub/file", broken())
    assert [path.suffix for path in folder.rglob("*") if path.is_file()] == [".part"]
    assert storage.begin(5, 1, "abc", continues=True).written() == {}
    assert [path for path in folder.rglob("*") if path.is_file()] == []
