"""Files that survive a crash."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest
from infra.parts import lacks

from checkpointing.storage.durable import fsync_tree, replace_file, write_file

SIZES = [0, 1, 4095, 4096, 1_000_000, 1_048_576, 5_000_001, 20_000_000]


def aligned(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, max(nbytes, 1))
    memory[:nbytes] = os.urandom(nbytes)
    return memoryview(memory)[:nbytes]


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


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "unaligned"])
def test_every_byte_arrives(nbytes: int, shift: int, tmp_path: Path) -> None:
    data = aligned(nbytes + shift)[shift:]
    assert write_file(tmp_path / "f", [data]) == nbytes
    assert (tmp_path / "f").read_bytes() == data


def test_pieces_follow_each_other(tmp_path: Path) -> None:
    pieces = [aligned(nbytes) for nbytes in (8_388_608, 2_000_000, 5, 3_000_000)]
    write_file(tmp_path / "f", pieces)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("options", ["", ",ro"], ids=["full", "read-only"])
def test_what_the_storage_refuses_is_told(options: str, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=4M{options} tmpfs {mount} 2>/dev/null") != 0:
        lacks("tmpfs", "mount failed")
    try:
        with pytest.raises(OSError, match=r"No space left|Read-only"):
            write_file(mount / "f", [aligned(8_000_000)])
    finally:
        os.system(f"umount {mount}")


def test_large_aligned_data_does_not_pass_through_the_page_cache(tmp_path: Path) -> None:
    """What O_DIRECT is for: write-back does not compete with training."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        lacks("O_DIRECT", "this file system refuses it")
    write_file(tmp_path / "f", [aligned(64 << 20)])
    cached = subprocess.run(["fincore", "-nbo", "RES", tmp_path / "f"], capture_output=True, text=True, check=True)
    assert int(cached.stdout) < 1 << 20
