"""Small files that survive a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.storage.durable import fsync_tree, replace_file


def test_a_file_gets_its_new_contents_by_one_rename(tmp_path: Path) -> None:
    path, temporary = tmp_path / "file", tmp_path / "file.tmp"
    path.write_bytes(b"old")
    seen: list[tuple[bytes, bytes]] = []
    replace_file(path, b"new", temporary, lambda: seen.append((path.read_bytes(), temporary.read_bytes())))
    assert seen == [(b"old", b"new")]
    assert path.read_bytes() == b"new" and not temporary.exists()


def test_what_the_disk_refuses_leaves_the_old_contents(tmp_path: Path) -> None:
    path, temporary = tmp_path / "file", tmp_path / "file.tmp"
    path.write_bytes(b"old")

    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", temporary, full)
    assert path.read_bytes() == b"old" and not temporary.exists()


def test_every_file_and_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    fsync_tree(tmp_path)
    assert len(synced) == 4
