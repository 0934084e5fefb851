"""Commits what a writer of `torch.distributed.checkpoint` writes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from checkpointing.dcp.folders import METADATA, CheckpointFolder, DigestedFile, entry_of, new_save, open_folder
from checkpointing.dcp.verified_files import FilesOfOneFolder
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.host.environment import RankSettings

# Among the results of a rank, in place of an item of the state: what it has written.
_FILES = MetadataIndex("")


def can_commit(writer: object) -> bool:
    """Return whether a writer is torch's for files, or rests on it; others decide by themselves what they write."""
    kind: Any = type(writer)
    return (
        isinstance(writer, FileSystemWriter)
        and kind.write_data is _FileSystemWriter.write_data
        and kind.finish is _FileSystemWriter.finish
    )


class StagedFiles(FilesOfOneFolder):
    """The file system of a writer while it saves: files are durable, digested, and out of sight until all are there.

    Args:
        folder: The checkpoint.

    Attributes:
        save: Folder of this save's files, below the checkpoint.
        entries: What was written, by this rank.
        metadata: Contents of `.metadata`, once it was written.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self.save = ""
        self.entries: list[FileEntry] = []
        self.metadata: bytes | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a new file; `mode` is `wb`."""
        name = os.fspath(path).rpartition("/")[2]
        if name == f"{METADATA}.tmp":
            memory = io.BytesIO()
            yield memory
            self.metadata = memory.getvalue()
            return
        with self._folder.create(self.save, name) as file:
            digested: Any = DigestedFile(file)
            yield digested
        self.entries.append(digested.entry(f"{self.save}/{name}"))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the folder is made when it is published."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Look whether the index is there already; files of a save have new names."""
        is_index = os.fspath(path).endswith(f"/{METADATA}")
        return is_index and self._folder.read(METADATA) is not None

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing: only the index is renamed, which is published later."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the index is replaced at once."""


class CommittingWriter(StorageWriter):
    """Stands before a writer for one save.

    Args:
        writer: For which `can_commit` holds.
        settings: What a supervisor has set: the attempt, 0 without one, and the name of the run.
        world_size: Number of ranks that save.
    """

    def __init__(self, writer: Any, settings: RankSettings, world_size: int) -> None:
        self._writer, self._world_size = writer, world_size
        self._attempt, self._run_id = settings.attempt, settings.lineage
        self.folder = open_folder(writer.path)
        self._files = StagedFiles(self.folder)
        self._began = time.monotonic()
        self.manifest: Manifest | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the save began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have the writer use the staged files meanwhile; what is not published at the end is removed."""
        names = {"fs": self._files, "sync_files": False}
        before = {name: getattr(self._writer, name) for name in names}
        vars(self._writer).update(names)
        try:
            yield
        except BaseException:
            if self._files.save:
                self.folder.discard(self._files.save)
            raise
        finally:
            vars(self._writer).update(before)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The writer's."""
        return self._writer.checkpoint_id  # type: ignore[no-any-return]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the writer was reset before."""

    def storage_meta(self) -> StorageMeta | None:
        """Return the writer's."""
        return self._writer.storage_meta()  # type: ignore[no-any-return]

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set the writer up; the rank that commits shuts out older attempts."""
        if is_coordinator and self._attempt:
            self.folder.begin(self._attempt, self._run_id, saves=True)
        # One that a program has derived may take less than torch's of today.
        takes_all = "kwargs" in inspect.signature(self._writer.set_up_storage_writer).parameters
        self._writer.set_up_storage_writer(is_coordinator, *args, **(kwargs if takes_all else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Have the writer do it."""
        return self._writer.prepare_local_plan(plan)  # type: ignore[no-any-return]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks one folder for their files: a part of the names that the index has."""
        save = new_save(self._attempt)
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"{save}/{plan.storage_data.prefix}"))
            for plan in self._writer.prepare_global_plan(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files; what was written goes to the rank that commits."""
        self._files.save = plan.storage_data.prefix.partition("/")[0]
        written = self._writer.write_data(plan, planner).wait()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*written, WriteResult(_FILES, 0, tuple(self._files.entries))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish what all ranks have written."""
        entries: list[FileEntry] = []
        for of_rank in results:
            entries += of_rank[-1].storage_data
        self._writer.finish(metadata, [of_rank[:-1] for of_rank in results])
        index = self._files.metadata
        assert index is not None
        self.manifest = Manifest(
            run_id=self._run_id,
            attempt=self._attempt,
            step=self.folder.step,
            world_size=self._world_size,
            samples_consumed=0,
            created_at=time.time(),
            files=(*entries, entry_of(METADATA, index)),
        )
        self.folder.publish(self._files.save, index, self.manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the writer was chosen already."""
        return True
