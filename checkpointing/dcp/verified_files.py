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
    """Have a reader use verified files meanwhile."""
    before, reader.fs = reader.fs, VerifiedFiles(os.fspath(reader.path), published)
    try:
        yield
    finally:
        reader.fs = before
