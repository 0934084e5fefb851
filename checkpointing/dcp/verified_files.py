"""Verifies what a reader of `torch.distributed.checkpoint` reads."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader

from checkpointing.commit.reading import MemoryFile
from checkpointing.dcp.folders import METADATA, Published
from checkpointing.dcp.harmless import check_index, check_value


def can_verify(reader: object) -> bool:
    """Return whether a reader is torch's for files, or rests on it; others decide by themselves what they read."""
    kind: Any = type(reader)
    return isinstance(reader, FileSystemReader) and kind.read_data is FileSystemReader.read_data


class FilesOfOneFolder(FileSystemBase):
    """What a file system of torch's does with names, for a checkpoint whose place is known."""

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Join with a slash, also in a URL."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path."""
        return path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: writer and reader were chosen already."""
        return True


class VerifiedFiles(FilesOfOneFolder):
    """The file system of a reader while it loads: what it reads is in memory, and was compared with its digest there.

    Args:
        path: Path or URL of the checkpoint, as the reader has it.
        published: The checkpoint.
    """

    def __init__(self, path: str, published: Published) -> None:
        self._path, self._published = path.rstrip("/"), published

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; `mode` is `rb`."""
        name = os.fspath(path).removeprefix(f"{self._path}/")
        if name == METADATA:
            check_index(self._published.metadata, self._path)
            yield io.BytesIO(self._published.metadata)
        else:
            yield MemoryFile(self._published.read(name))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the checkpoint has such a file."""
        name = os.fspath(path).removeprefix(f"{self._path}/")
        return any(file.name == name for file in self._published.manifest.files)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Refuse."""
        raise io.UnsupportedOperation("a checkpoint that is loaded is not written to")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Refuse."""
        self.mkdir(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Refuse."""
        self.mkdir(path)


@contextlib.contextmanager
def verified(reader: Any, published: Published) -> Iterator[None]:
    """Have a reader use verified files meanwhile, and values that make nothing but data."""
    where = os.fspath(reader.path)
    before, reader.fs = reader.fs, VerifiedFiles(where, published)
    read_data = reader.read_data
    reader.read_data = lambda plan, planner: read_data(plan, _CheckingPlanner(planner, where))
    try:
        yield
    finally:
        reader.fs = before
        del reader.read_data


class _CheckingPlanner:
    """A load planner whose values that are no tensors are checked before torch unpickles them."""

    def __init__(self, planner: Any, where: str) -> None:
        self._planner, self._where = planner, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Check the value, and have it loaded."""
        check_value(value.getvalue(), self._where, read_item.dest_index.fqn)
        self._planner.load_bytes(read_item, value)
