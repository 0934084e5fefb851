"""Checkpoints on a local disk or a mounted volume (PVC, NFS).

The order of a commit must not change: temporary directory next to the target → each file written and fsync'ed →
manifest written and fsync'ed → the directory fsync'ed → rename → the parent fsync'ed. A rename without the first
three can survive a power cut that its contents do not; a rename without the last can be lost in one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.digest import PART_BYTES
from checkpointing.errors import CommitConflict, InvalidCheckpoint
from checkpointing.failpoints import failpoint
from checkpointing.manifest import MANIFEST_NAME, Manifest
from checkpointing.storage.base import CHECKPOINT_PREFIX, IRREGULAR, NUMBER, Storage
from checkpointing.storage.direct_io import write_file, write_range
from checkpointing.storage.durable import fsync_directory, replace_file
from checkpointing.storage.fence import Fence
from checkpointing.storage.local_sidecars import RESTART_STATE_NAME, LocalSidecars
from checkpointing.storage.rates import Rates, measure_directory

_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}({NUMBER})\Z")
_TEMPORARY = re.compile(rf"\.(?:{CHECKPOINT_PREFIX}{NUMBER}(?:\.[0-9a-f]+)?|fence\.json)\.({NUMBER})\.tmp\Z")
_TEMPORARY_STATE = re.compile(rf"\.runner\.json\.{NUMBER}\.tmp\Z")
_QUARANTINED = re.compile(rf"{CHECKPOINT_PREFIX}{NUMBER}\.(invalid|superseded)(-{NUMBER})?\Z")
# Of a stock Trainer and of this library.
TRAINER_STATE = "trainer_state.json"
_ONLY_OURS = re.compile(r"loop_state_\d+\.json\Z|data_state(_\d+)?\.pth\Z|rank_state_\d+\.pt\Z")
_FENCE_NAME = ".fence.json"
_SAMPLE_BYTES = 4096
_REMOVING = re.compile(rf"\.{CHECKPOINT_PREFIX}{NUMBER}\.removing\Z")


def _add_sizes(folder: Path, prefix: str, sizes: dict[str, int]) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    _add_sizes(Path(entry.path), f"{prefix}{entry.name}/", sizes)
                status = entry.stat(follow_symlinks=False)
                sizes[f"{prefix}{entry.name}"] = status.st_size if stat.S_ISREG(status.st_mode) else IRREGULAR


def _samples(nbytes: int) -> Iterator[int]:
    """Yield places in a file of which some bytes are compared: the first and the last ones of each part."""
    for start in range(0, nbytes, PART_BYTES):
        yield start
        yield max(min(start + PART_BYTES, nbytes) - _SAMPLE_BYTES, start)


def _watched(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        failpoint("local.write")


class LocalTransaction:
    """See `Transaction`. Files are written by one thread of each node, in any order."""

    def __init__(self, storage: LocalStorage, step: int, attempt: int, together: str, *, joins: bool) -> None:
        self._storage, self._step, self._attempt = storage, step, attempt
        root = storage.root
        if storage.has_begun(attempt) and not root.is_dir():
            # A new directory of that name would have neither fence nor lock.
            raise OSError(errno.ENOENT, f"{root} existed when attempt {attempt} began and is gone; put it back")
        self._target = root / f"{CHECKPOINT_PREFIX}{step}"
        self._temporary = root / f".{CHECKPOINT_PREFIX}{step}{together and f'.{together}'}.{attempt}.tmp"
        # Directories that contain files.
        self._folders: set[Path] = set()
        if joins:
            return
        root.mkdir(parents=True, exist_ok=True)
        # What is left of the same attempt can only be a failed try of this process.
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        try:
            failpoint("local.begun")
        except OSError:
            self.abort()
            raise

    def write(self, name: str, pieces: Iterable[memoryview]) -> int:
        """Write and sync a file."""
        nbytes = write_file(self._place(name), _watched(pieces))
        failpoint("local.written")
        return nbytes

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
        write_file(self._temporary / MANIFEST_NAME, [memoryview(manifest.to_json())])
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
            shutil.rmtree(self._temporary, ignore_errors=True)
            if not self._temporary.exists():
                return


class LocalStorage(Storage):
    """See `Storage`. `root` is created on the first write."""

    root: Path

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        # Once an attempt has begun, a directory that is missing was moved away, and no new one may take its place.
        self.sidecars = LocalSidecars(root, may_create=lambda: self._claim.attempt < 0)

    @property
    def can_split(self) -> bool:
        """Always: nodes that write here share a file system."""
        return True

    def probe(self) -> None:
        """Write and sync a file, and remove it."""
        self.root.mkdir(parents=True, exist_ok=True)
        # Pods that share a volume have the same process numbers.
        path = self.root / f".probe.{uuid.uuid4().hex}"
        try:
            write_file(path, [memoryview(b"probe")])
        finally:
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return the free space of the file system."""
        return shutil.disk_usage(self.root).free

    def measure(self, checkpoint_bytes: int) -> Rates | None:
        """Measure by writing a file."""
        return measure_directory(self.root, checkpoint_bytes)

    def remove_all(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.root, ignore_errors=True)

    def fence(self) -> Fence:
        """Read the fence's file."""
        path = self.root / _FENCE_NAME
        try:
            return Fence.from_json(path.read_bytes())
        except FileNotFoundError:
            return Fence()
        except ValueError as error:
            raise OSError(f"{path}: {error}; remove it if no run writes here") from None

    def begin(self, step: int, attempt: int, together: str = "", *, joins: bool = False) -> LocalTransaction:
        """Create the temporary directory."""
        return LocalTransaction(self, step, attempt, together, joins=joins)

    def describe(self, step: int) -> str:
        """Return the checkpoint's path."""
        return str(self.directory(step))

    def directory(self, step: int) -> Path:
        """Return the checkpoint's directory, whether or not it exists."""
        return self.root / f"{CHECKPOINT_PREFIX}{step}"

    def file(self, manifest: Manifest, name: str) -> Path:
        """Return the path of a file."""
        return self.directory(manifest.step) / name

    def _are_foreign(self, names: Sequence[str]) -> bool:
        # One of this library may have lost its manifest.
        return TRAINER_STATE in names and MANIFEST_NAME not in names and not any(map(_ONLY_OURS.match, names))

    def keeps(self, manifest: Manifest) -> bool:
        """Return whether this very checkpoint is here, and make its name durable."""
        if not super().keeps(manifest):
            return False
        # The earlier try may have failed at this.
        fsync_directory(self.root)
        return True

    def remove(self, step: int) -> None:
        """Rename the directory, then delete it."""
        path = self.directory(step)
        # One atomic rename first: a crash during the deletion then leaves no directory with a checkpoint's name.
        doomed = self.root / f".{CHECKPOINT_PREFIX}{step}.removing"
        if doomed.exists():
            fsync_directory(self.root)
            shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        # A power cut must not restore its name without its files.
        fsync_directory(self.root)
        failpoint("local.removing")
        with contextlib.suppress(FileNotFoundError):
            (doomed / MANIFEST_NAME).unlink()
        failpoint("local.unlisted")
        shutil.rmtree(doomed)

    def quarantine(self, step: int, label: str = "invalid") -> str:
        """Rename the directory to `checkpoint-<step>.<label>`, with a number if that exists."""
        path = self.directory(step)
        number = 0
        while True:
            aside = path.with_name(f"{path.name}.{label}" + (f"-{number}" if number else ""))
            if not aside.exists():
                path.rename(aside)
                fsync_directory(self.root)
                return str(aside)
            number += 1

    def quarantined(self) -> list[str]:
        """Return the names of quarantined directories."""
        return [name for name in self._names() if _QUARANTINED.match(name)]

    def sweep(self) -> list[str]:
        """Remove temporary directories and files."""
        # This process may be writing its restart state now.
        ours = f"{RESTART_STATE_NAME}.{os.getpid()}.tmp"
        swept = [
            name
            for name in self._names()
            if ((match := _TEMPORARY.match(name)) and self._claim.outlives(int(match.group(1))))
            or (_TEMPORARY_STATE.match(name) and name != ours)
            or _REMOVING.match(name)
        ]
        if swept:
            # As in `remove`, whose writer may have died before.
            fsync_directory(self.root)
        for name in swept:
            path = self.root / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return swept

    def _manifest(self, step: int) -> Manifest:
        path = self.directory(step)
        try:
            if not stat.S_ISREG((path / MANIFEST_NAME).lstat().st_mode):
                raise InvalidCheckpoint(str(path), f"{MANIFEST_NAME} is not a regular file")
            data = (path / MANIFEST_NAME).read_bytes()
        except FileNotFoundError:
            raise InvalidCheckpoint(str(path), f"no {MANIFEST_NAME}: it was never committed") from None
        except OSError as error:
            raise InvalidCheckpoint(str(path), f"{MANIFEST_NAME} cannot be read ({error.strerror})") from None
        return Manifest.from_json(data, str(path))

    def _put_fence(self, fence: Fence) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f"{_FENCE_NAME}.{fence.attempt}.tmp"
        replace_file(self.root / _FENCE_NAME, fence.to_json(), temporary, lambda: failpoint("fence.written"))

    def _sizes(self, step: int | None = None) -> dict[str, int]:
        sizes = {}
        for number in [step] if step is not None else self._listed():
            # A directory without files is named like a checkpoint, too.
            sizes[f"{CHECKPOINT_PREFIX}{number}/"] = 0
            _add_sizes(self.directory(number), f"{CHECKPOINT_PREFIX}{number}/", sizes)
        return sizes

    def _steps(self, sizes: Mapping[str, int]) -> set[int]:
        # Not listed again: what has been committed since would seem to lack its files.
        return {int(name.partition("/")[0].removeprefix(CHECKPOINT_PREFIX)) for name in sizes}

    def _listed(self) -> list[int]:
        return [int(match.group(1)) for name in self._names() if (match := _CHECKPOINT.match(name))]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))  # noqa: PTH208 - names, not paths
        except FileNotFoundError:
            return []


def open_location(location: str) -> LocalStorage:
    """Open a path or a `file://` URL.

    Args:
        location: Path or URL.

    Returns:
        The storage.

    Raises:
        ValueError: The URL names no absolute path.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return LocalStorage(Path(location))
    if not rest.startswith("/"):
        raise ValueError(f"location {location!r} is not allowed: write {scheme}:///path, with three slashes")
    return LocalStorage(Path(rest))
