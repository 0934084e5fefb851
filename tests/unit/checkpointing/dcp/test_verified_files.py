"""What a reader has in place of its file system."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
from helpers.small_dcp import dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from checkpointing.dcp.folders import METADATA, LocalFolder, entry_of, new_save
from checkpointing.dcp.verified_files import VerifiedFiles, can_verify, verified
from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.manifest import Manifest

INDEX = pickle.dumps({"weight": (1, 2)})


def saved(place: Path) -> tuple[LocalFolder, str]:
    folder, save = LocalFolder(place), new_save(0)
    with folder.create(save, "a") as file:
        file.write(b"data")
    entries = (entry_of(f"{save}/a", b"data"), entry_of(METADATA, INDEX))
    folder.publish(save, INDEX, Manifest("", 0, 1, 1, 0, 0.0, entries))
    return folder, save


def test_torchs_readers_of_files_are_verified_and_no_others(tmp_path: Path) -> None:
    assert can_verify(dcp.FileSystemReader(tmp_path)) and not can_verify(object())
    assert not can_verify(HuggingFaceStorageReader(str(tmp_path)))


def test_files_are_read_whole_and_compared(tmp_path: Path) -> None:
    folder, save = saved(tmp_path / "step-1")
    reader = dcp.FileSystemReader(tmp_path / "step-1")
    own = reader.fs
    with verified(reader, folder.published()):
        files: VerifiedFiles = reader.fs
        with files.create_stream(files.concat_path(tmp_path / "step-1", METADATA), "rb") as index:
            assert index.read() == INDEX
        name = files.concat_path(tmp_path / "step-1", f"{save}/a")
        with files.create_stream(name, "rb") as file:
            assert file.read() == b"data" and files.exists(name)
        (tmp_path / "step-1" / save / "a").write_bytes(b"dat4")
        with pytest.raises(InvalidCheckpoint, match="a was altered"), files.create_stream(name, "rb"):
            pass
    assert reader.fs is own


def test_nothing_is_written_through_it(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "step-1")
    files = VerifiedFiles(str(tmp_path / "step-1"), folder.published())
    for call in (files.mkdir, files.rm_file, lambda path: files.rename(path, path)):
        with pytest.raises(io.UnsupportedOperation):
            call("x")
