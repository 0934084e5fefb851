"""One save in a directory.

The order of a commit must not change: temporary directory next to the target → each file written and fsync'ed →
manifest written and fsync'ed → the directory fsync'ed → rename → the parent fsync'ed. A rename without the first
three can survive a power cut that its contents do not; a rename without the last can be lost in one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpointing.errors import CommitConflict
from checkpointing.format.digest import PART_BYTES
from checkpointing.format.manifest import MANIFEST_NAME, Manifest
from checkpointing.host.failpoints import failpoint
from checkpointing.storage.base import CHECKPOINT_PREFIX, Storage
from checkpointing.storage.durable import fsync_directory, replace_file, write_file, write_range

_SAMPLE_BYTES = 4096
# Of a file that is being written where another process may continue.
_PARTIAL = ".part"


def _watched(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        failpoint("local.write")


class LocalTransaction:
    """See `Transaction`. Files are written by one thread of each node, in any order."""

    def __init__(
        self, storage: Storage, root: Path, step: int, attempt: int, identity: str, *, joins: bool, continues: bool
    ) -> None:
        self._storage, self._step, self._attempt = storage, step, attempt
        self._target = root / f"{CHECKPOINT_PREFIX}{step}"
        self._temporary = root / f".{CHECKPOINT_PREFIX}{step}{identity and f'.{identity}'}.{attempt}.tmp"
        # Directories that contain files.
        self._folders: set[Path] = set()
        self._continues = continues
        if joins:
            return
        root.mkdir(parents=True, exist_ok=True)
        if not continues:
            # What is left of the same attempt can only be a failed try of this process.
            shutil.rmtree(self._temporary, ignore_errors=True)
        try:
            self._temporary.mkdir()
        except FileExistsError:
            if not continues:
                raise
            # Not of one that was just made: a volume may give it to another user (NFS, CIFS, FUSE).
            _check_own(self._temporary)
        for partial in self._temporary.rglob(f"*{_PARTIAL}") if continues else ():
            partial.unlink(missing_ok=True)
        try:
            failpoint("local.begun")
        except OSError:
            self.abort()
            raise

    def write(self, name: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Write and sync a file."""
        path = self._place(name)
        # A process that continues takes what has its name for whole.
        target = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PARTIAL}") if self._continues else path
        written = write_file(target, _watched(pieces))
        if target != path:
            target.rename(path)
        failpoint("local.written")
        return written

    def written(self) -> dict[str, int]:
        """List the files; their folders are synced, too, before the commit."""
        found = {}
        for path in sorted(self._temporary.rglob("*")):
            if path.is_file() and not path.is_symlink():
                found[path.relative_to(self._temporary).as_posix()] = path.stat().st_size
                self._place(path.relative_to(self._temporary).as_posix())
        return found

    def write_note(self, name: str, data: bytes) -> None:
        """Write and sync a file, and rename it."""
        path = self._place(name)
        replace_file(path, data, path.with_name(f".{path.name}.tmp"))

    def read_note(self, name: str) -> bytes | None:
        """Read a file."""
        path = self._temporary / name
        try:
            return path.read_bytes()
        except OSError as error:
            # Over NFS, one that is being replaced.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        # A client of NFS may remember for half a minute that there is none, unless the directory changes.
        for folder in path.parents:
            with contextlib.suppress(OSError):
                os.utime(folder)
            if folder == self._target.parent:
                break
        return None

    def withdraw(self, names: Sequence[str]) -> None:
        """Unlink the files."""
        for name in names:
            with contextlib.suppress(OSError):
                (self._temporary / name).unlink(missing_ok=True)

    def open_split(self, name: str, nbytes: int) -> str:
        """Create a file of that size, under a name that only those know who are given it."""
        token = uuid.uuid4().hex
        with self._split_path(name, token).open("xb") as file:
            file.truncate(nbytes)
        return token

    def write_parts(self, name: str, token: str, first: int, data: memoryview) -> list[Any]:
        """Write and sync a range of the file."""
        write_range(self._split_path(name, token), first * PART_BYTES, data)
        return []

    def close_split(self, name: str, token: str, data: memoryview, receipts: Sequence[Any]) -> None:
        """Look whether the parts of all nodes are there, sync the file's size, and give the file its name.

        Where a mount keeps whole objects (gcsfuse, rclone), what one node has written replaces what others have.
        """
        path = self._split_path(name, token)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for start in _samples(len(data)):
                if os.pread(descriptor, _SAMPLE_BYTES, start) != data[start : start + _SAMPLE_BYTES]:
                    raise OSError(
                        errno.EIO, "what the nodes have written is not in it: does each see what others write?"
                    )
            if os.fstat(descriptor).st_size != len(data):
                raise OSError(errno.EIO, f"{path} has not the size that it was created with")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path.rename(self._temporary / name)

    def drop_split(self, name: str, token: str) -> None:
        """Unlink the file: who has it open writes to nothing."""
        with contextlib.suppress(OSError):
            self._split_path(name, token).unlink(missing_ok=True)

    def _split_path(self, name: str, token: str) -> Path:
        path = self._place(name)
        return path.with_name(f".{path.name}.{token}")

    def _place(self, name: str) -> Path:
        """Return the path of a file, in a folder that exists."""
        path = self._temporary / name
        folders = [folder for folder in path.parents if folder.is_relative_to(self._temporary)]
        # Not the temporary directory itself: the node that commits may have given the save up, and removed it.
        for folder in reversed(folders[:-1]):
            folder.mkdir(exist_ok=True)
        self._folders |= set(folders)
        return path

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and rename the directory, in the order that this module describes."""
        path = self._temporary / MANIFEST_NAME
        if self._continues:
            # An earlier process may have written it.
            replace_file(path, manifest.to_json(), path.with_name(f".{MANIFEST_NAME}.{uuid.uuid4().hex}{_PARTIAL}"))
        else:
            write_file(path, [memoryview(manifest.to_json())])
        failpoint("local.manifest")
        for folder in self._folders - {self._temporary}:
            fsync_directory(folder)
        fsync_directory(self._temporary)
        failpoint("local.synced")
        self._storage.check_fence(self._step, self._attempt)
        if self._target.exists():
            self._storage.displace_stale(self._step, self._attempt)
        # rename(2) replaces an empty directory silently; only this class creates these names, so a check is enough.
        if self._target.exists():
            raise CommitConflict(f"{self._target} exists already; it is kept and this copy is dropped")
        try:
            self._temporary.rename(self._target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise CommitConflict(f"{self._target} exists already; it is kept and this copy is dropped") from None
            raise
        failpoint("local.renamed")
        fsync_directory(self._target.parent)
        failpoint("local.committed")
        # A newer attempt may have begun in between; then this checkpoint counts only if that one has seen it.
        self._storage.check_fence(self._step, self._attempt)

    def abort(self) -> None:
        """Remove the temporary directory; another node may write a note there at that moment."""
        for _ in range(5):
            if _remove_tree(self._temporary):
                return


def _check_own(folder: Path) -> None:
    """Raise OSError unless a folder is one that this user has made: what another one has put there is not continued."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        text = "another user has begun it; remove that folder, or have that user continue"
        raise OSError(errno.EPERM, text, str(folder))


def _remove_tree(folder: Path) -> bool:
    """Remove what can be removed; return False if something was added meanwhile."""
    failures: list[BaseException] = []
    shutil.rmtree(folder, onerror=lambda _call, _path, info: failures.append(info[1]))
    return not any(isinstance(failure, OSError) and failure.errno == errno.ENOTEMPTY for failure in failures)


def _samples(nbytes: int) -> Iterator[int]:
    """Yield places in a file of which some bytes are compared: the first and the last ones of each part."""
    for start in range(0, nbytes, PART_BYTES):
        yield start
        yield max(min(start + PART_BYTES, nbytes) - _SAMPLE_BYTES, start)
