"""What stands before a writer while it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_dcp import commit_and_verify, dcp
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan

from checkpointing.dcp.committing_writer import CommittingWriter, StagedFiles, can_commit
from checkpointing.dcp.folders import METADATA
from checkpointing.host.environment import RankSettings


class Derived(dcp.FileSystemWriter):  # type: ignore[misc]
    """Has no files of its own."""


def test_torchs_writers_of_files_commit_and_no_others(tmp_path: Path) -> None:
    assert can_commit(dcp.FileSystemWriter(tmp_path)) and can_commit(Derived(tmp_path))
    assert not can_commit(HuggingFaceStorageWriter(str(tmp_path))) and not can_commit(object())


def test_all_ranks_write_into_one_folder_that_no_other_save_has(tmp_path: Path) -> None:
    writers = [
        CommittingWriter(dcp.FileSystemWriter(tmp_path / "step-1"), RankSettings(attempt=2), 2) for _ in range(2)
    ]
    prefixes = [
        plan.storage_data.prefix
        for writer in writers
        for plan in writer.prepare_global_plan([SavePlan([]), SavePlan([], storage_data=_StoragePrefix("__1_"))])
    ]
    folders = [prefix.partition("/")[0] for prefix in prefixes]
    assert [prefix.partition("/")[2] for prefix in prefixes] == ["__0_", "__1_"] * 2
    assert folders[0] == folders[1] != folders[2] == folders[3] and all(one.startswith("2.") for one in folders)


def test_a_writer_is_what_it_was_after_the_save(tmp_path: Path) -> None:
    own: Any = dcp.FileSystemWriter(tmp_path / "step-1", sync_files=True)
    files = own.fs
    with CommittingWriter(own, RankSettings(attempt=0), 1).active():
        assert isinstance(own.fs, StagedFiles) and not own.sync_files
    assert own.fs is files and own.sync_files


def test_the_index_stays_in_memory_and_files_out_of_sight(tmp_path: Path) -> None:
    writer = CommittingWriter(dcp.FileSystemWriter(tmp_path / "step-1"), RankSettings(attempt=0), 1)
    files = StagedFiles(writer.folder)
    files.save = "0.0123456789ab"
    with files.create_stream(tmp_path / "step-1" / f"{METADATA}.tmp", "wb") as index:
        index.write(b"index")
    with files.create_stream(tmp_path / "step-1" / "0.0123456789ab" / "__0_0.distcp", "wb") as file:
        file.write(b"data")
    assert files.metadata == b"index" and not (tmp_path / "step-1").exists()
    assert [(entry.name, entry.size) for entry in files.entries] == [("0.0123456789ab/__0_0.distcp", 4)]
    with pytest.raises(FileExistsError), files.create_stream("0.0123456789ab/__0_0.distcp", "wb"):
        pass


class Earlier(dcp.FileSystemWriter):  # type: ignore[misc]
    """Of a program that was written for an earlier torch."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Take one argument."""


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_derived_writer_may_take_fewer_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = commit_and_verify(monkeypatch)
    dcp.save({"a": torch.ones(2)}, storage_writer=Earlier(tmp_path / "step-3"))
    assert [one.step for one in reports] == [3]
