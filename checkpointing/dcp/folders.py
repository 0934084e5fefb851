"""Folders of `torch.distributed.checkpoint` that are published at once, on a local disk or in an object store.

    <checkpoint_id>/.metadata                          torch's index: the commit point, written last, replaced at once
    <checkpoint_id>/<attempt>.<nonce>/<file>           what it names; no two saves share a folder
    <checkpoint_id>/<attempt>.<nonce>/manifest.json    size and digest of each file, and of `.metadata`
    <parent>/.checkpointing/                           saves that are not published yet, and what was quarantined
    <parent>/.checkpointing/attempt                    the run that saves here, and its newest attempt

A save may replace an earlier one of the same name: until `.metadata` is replaced, the earlier one is read. Torch's own
readers find all files, since an index names them relative to its folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from checkpointing.commit.reading import fault, read_private
from checkpointing.commit.tiers import LOCAL, REMOTE
from checkpointing.errors import CommitFailed, Fenced, ForeignCheckpoint, InvalidCheckpoint
from checkpointing.format.digest import PART_BYTES, RunningDigest, algorithm_of, digest_buffer
from checkpointing.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from checkpointing.host.failpoints import failpoint
from checkpointing.storage import open_storage
from checkpointing.storage.base import RemoteFile
from checkpointing.storage.durable import fsync_directory, replace_file, write_file
from checkpointing.storage.object_store import ObjectFile, ObjectStore

METADATA = ".metadata"
_OWN = ".checkpointing"
# What this process has begun: the place, the attempt and the run. It takes nothing over a second time.
_CLAIMED: set[tuple[str, int, str]] = set()
_SAVE = re.compile(r"(0|[1-9][0-9]{0,17})\.[0-9a-f]{12}")
_UNPUBLISHED = re.compile(rf"(?P<name>.*)\.(?P<save>{_SAVE.pattern})\.tmp", re.DOTALL)
_STEP = re.compile(r"([0-9]{1,17})\D*\Z")


def new_save(attempt: int) -> str:
    """Return the name of a folder for the files of one save, which no other save has."""
    return f"{attempt}.{uuid.uuid4().hex[:12]}"


class CheckpointFolder(ABC):
    """What one `checkpoint_id` names.

    Every call that reaches storage may raise OSError.

    Attributes:
        where: Its path or URL.
        name: Its last part.
        tier: `local` or `remote`.
    """

    tier: str

    def __init__(self, where: str) -> None:
        self.where, self.name = where, where.rstrip("/").rpartition("/")[2]

    @property
    def step(self) -> int:
        """The last number in its name; 0 where there is none."""
        found = _STEP.search(self.name)
        return int(found[1]) if found else 0

    # -- saving --------------------------------------------------------------------------------------------------

    @abstractmethod
    def create(self, save: str, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a new file of a save; when the context ends without an error, it is durable."""

    def publish(self, save: str, metadata: bytes, manifest: Manifest) -> None:
        """Publish a save, of which all files are durable.

        Args:
            save: From `new_save`.
            metadata: Contents of `.metadata`.
            manifest: Names all files, and `.metadata`.

        Raises:
            Fenced: A newer attempt has begun here.
            CommitFailed: Files that were written are not there.
        """
        found = self._staged(save)
        for file in manifest.files:
            if file.name != METADATA and found.get(file.name.removeprefix(f"{save}/")) != file.size:
                raise CommitFailed(
                    f"{self.where}: {file.name} was written by another node, and is not there: do all nodes see the "
                    "same folder?"
                )
        self._check_writer(manifest.attempt, manifest.run_id)
        self._publish(save, metadata, manifest.to_json())
        self._check_writer(manifest.attempt, manifest.run_id)

    @abstractmethod
    def discard(self, save: str) -> None:
        """Remove the files of a save that was not published; failures leave them."""

    def begin(self, attempt: int, run_id: str, *, saves: bool) -> None:
        """Shut out the writers of older attempts, and remove what they have not published.

        Args:
            attempt: Number of the attempt.
            run_id: Name of the run.
            saves: Whether the writers of other runs are shut out, too. A run may also load from the folder of another
                one, which goes on saving there, or from one that it may not write to.

        Raises:
            Fenced: A newer attempt of this run has begun here.
            CommitFailed: Another run has, since this process has begun.
        """
        claim = self.where.removesuffix(self.name), attempt, run_id
        if claim in _CLAIMED:
            self._check_writer(attempt, run_id)
            return
        newest, owner = self._newest()
        if owner == run_id and newest > attempt:
            raise Fenced(newest, self.where, attempt)
        if owner != run_id and not saves:
            return
        if (newest, owner) != (attempt, run_id):
            self._put_attempt(f"{attempt} {run_id}\n".encode())
            self._sweep(attempt)
        _CLAIMED.add(claim)

    def belongs_to(self, run_id: str) -> bool:
        """Return whether a run saves here: what other runs have saved is theirs, damaged or not."""
        return self._newest()[1] == run_id

    def _check_writer(self, attempt: int, run_id: str) -> None:
        newest, owner = self._newest()
        if attempt and owner != run_id:
            raise CommitFailed(f"{self.where}: another run saves next to it by now: give each a folder of its own")
        if newest > attempt > 0:
            raise Fenced(newest, self.where, attempt)

    def _newest(self) -> tuple[int, str]:
        data = self._read_attempt()
        if data is None:
            return 0, ""
        number, _, owner = data.decode("utf-8", "replace").strip().partition(" ")
        if not number.isdecimal():
            raise CommitFailed(f"{self.where}: the file `attempt` in {_OWN} next to it is damaged; remove it")
        return int(number), owner

    @abstractmethod
    def _staged(self, save: str) -> dict[str, int]:
        """Return the sizes of a save's files, by name."""

    @abstractmethod
    def _publish(self, save: str, metadata: bytes, manifest: bytes) -> None: ...

    @abstractmethod
    def _read_attempt(self) -> bytes | None: ...

    @abstractmethod
    def _put_attempt(self, data: bytes) -> None: ...

    @abstractmethod
    def _sweep(self, attempt: int) -> None: ...

    # -- loading -------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is none."""

    @abstractmethod
    def file(self, entry: FileEntry) -> Path | RemoteFile:
        """Return a file, to be read."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files, by name."""

    @abstractmethod
    def quarantine(self) -> str:
        """Take a damaged checkpoint out of the way, so that nothing finds it; return where it is kept."""

    def published(self) -> Published:
        """Return what is published here.

        Raises:
            ForeignCheckpoint: This library has not written it.
            InvalidCheckpoint: It is not whole.
        """
        # Again, if it is replaced at this moment.
        for is_last in (False, True):
            metadata = self.read(METADATA)
            try:
                return self._found(metadata)
            except InvalidCheckpoint:
                if is_last or self.read(METADATA) == metadata:
                    raise
        raise AssertionError("not reached")

    def _found(self, metadata: bytes | None) -> Published:
        sizes = self.sizes()
        saves = sorted({name.partition("/")[0] for name in sizes if _SAVE.fullmatch(name.partition("/")[0])})
        if not saves:
            raise ForeignCheckpoint(self.where, f"it has no {MANIFEST_NAME}: this library has not written it")
        if metadata is None:
            raise InvalidCheckpoint(self.where, f"no {METADATA}: it was never committed")
        problem = ""
        for save in saves:
            data = self.read(f"{save}/{MANIFEST_NAME}")
            if data is None:
                continue
            try:
                manifest = Manifest.from_json(data, self.where)
            except InvalidCheckpoint as error:
                problem = error.reason
                continue
            files = {file.name: file for file in manifest.files}
            index = files.get(METADATA)
            if index is None or digest_buffer(metadata, algorithm_of(index.digest)) != index.digest:
                continue
            for name, file in files.items():
                if sizes.get(name) != file.size:
                    raise InvalidCheckpoint(
                        self.where, f"{name} is missing or has another size than the {file.size} bytes written"
                    )
            return Published(self, metadata, manifest, files)
        raise InvalidCheckpoint(self.where, problem or f"{METADATA} was altered: no {MANIFEST_NAME} has its digest")


class Published:
    """A published checkpoint, whose index and sizes were checked.

    Attributes:
        metadata: Contents of `.metadata`.
        manifest: Its manifest.
    """

    def __init__(
        self, folder: CheckpointFolder, metadata: bytes, manifest: Manifest, files: dict[str, FileEntry]
    ) -> None:
        self._folder, self.metadata, self.manifest, self._files = folder, metadata, manifest, files

    def read(self, name: str) -> memoryview:
        """Return a file, read into memory, with its digest compared.

        Raises:
            FileNotFoundError: It is no part of the checkpoint.
            InvalidCheckpoint: It is not what was written.
            StorageUnreachable: It cannot be read now.
        """
        entry = self._files.get(name)
        if entry is None:
            raise FileNotFoundError(f"{self._folder.where}: {name} is no part of this checkpoint")
        for _ in range(2):
            # A network may have altered it on the way: what is wrong twice is wrong.
            try:
                data, digest = read_private(self._folder.file(entry), algorithm=algorithm_of(entry.digest))
            except OSError as error:
                raise fault(self._folder.where, name, error) from None
            if digest == entry.digest:
                return data
        raise InvalidCheckpoint(self._folder.where, f"{name} was altered: its digest differs from the manifest's")


class LocalFolder(CheckpointFolder):
    """A directory. What is not published is next to it, in a hidden folder, under a name that no loader looks for."""

    tier = LOCAL

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.abspath(path))  # noqa: PTH100 - a symbolic link stays what the user has named
        super().__init__(str(self._path))
        self._own = self._path.parent / _OWN

    @contextlib.contextmanager
    def create(self, save: str, name: str) -> Iterator[IO[bytes]]:
        """Create a file in the hidden folder."""
        folder = self._staging(save)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("xb") as file:
            yield file
            file.flush()
            failpoint("dcp.written")
            os.fsync(file.fileno())

    def _staged(self, save: str) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._staging(save).iterdir()}

    def _publish(self, save: str, metadata: bytes, manifest: bytes) -> None:
        staging = self._staging(save)
        write_file(staging / MANIFEST_NAME, [memoryview(manifest)])
        fsync_directory(staging)
        self._path.mkdir(parents=True, exist_ok=True)
        staging.rename(self._path / save)
        fsync_directory(self._path)
        failpoint("dcp.publishing")
        replace_file(self._path / METADATA, metadata, self._path / f"{METADATA}.{save}.tmp")
        fsync_directory(self._path.parent)
        failpoint("dcp.published")
        self._remove_others(save)

    def _remove_others(self, save: str) -> None:
        """Remove what this save has replaced, and what earlier ones of this name have left."""
        for path in self._path.iterdir():
            if _SAVE.fullmatch(path.name) and path.name != save:
                shutil.rmtree(path, ignore_errors=True)
        for path, name, _ in self._unpublished():
            if name == self.name:
                shutil.rmtree(path, ignore_errors=True)

    def discard(self, save: str) -> None:
        """Remove the folder, where it was not moved yet."""
        shutil.rmtree(self._staging(save), ignore_errors=True)

    def _staging(self, save: str) -> Path:
        return self._own / f"{self.name}.{save}.tmp"

    def _unpublished(self) -> Iterator[tuple[Path, str, int]]:
        """Yield the folders of saves that are not published, each with the checkpoint's name and the attempt."""
        for path in self._own.glob("*.tmp"):
            if found := _UNPUBLISHED.fullmatch(path.name):
                yield path, found["name"], int(found["save"].partition(".")[0])

    def _read_attempt(self) -> bytes | None:
        try:
            return (self._own / "attempt").read_bytes()
        except FileNotFoundError:
            return None

    def _put_attempt(self, data: bytes) -> None:
        self._own.mkdir(parents=True, exist_ok=True)
        replace_file(self._own / "attempt", data, self._own / f"attempt.{os.getpid()}")

    def _sweep(self, attempt: int) -> None:
        for path, _, number in self._unpublished():
            if number < attempt:
                shutil.rmtree(path, ignore_errors=True)

    def read(self, name: str) -> bytes | None:
        """Read the file."""
        try:
            return (self._path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def file(self, entry: FileEntry) -> Path:
        """Return its path."""
        return self._path / entry.name

    def sizes(self) -> dict[str, int]:
        """Walk the directory."""
        found = {}
        for parent, _, names in os.walk(self._path):
            for name in names:
                path = Path(parent, name)
                with contextlib.suppress(FileNotFoundError):
                    found[path.relative_to(self._path).as_posix()] = path.stat().st_size
        return found

    def quarantine(self) -> str:
        """Rename the directory."""
        aside = self._own / "invalid" / f"{self.name}.{uuid.uuid4().hex[:12]}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        self._path.rename(aside)
        fsync_directory(self._path.parent)
        return str(aside)


class ObjectFolder(CheckpointFolder):
    """Keys below a prefix. Files are uploaded to where they stay, and nothing names them before `.metadata` does."""

    tier = REMOTE

    def __init__(self, store: ObjectStore, name: str) -> None:
        super().__init__(f"{store.location}/{name}")
        self._store = store

    @contextlib.contextmanager
    def create(self, save: str, name: str) -> Iterator[IO[bytes]]:
        """Upload while it is written."""
        upload: Any = _Upload(self._store, self._key(f"{save}/{name}"))
        try:
            yield upload
        except BaseException:
            upload.give_up()
            raise
        upload.finish()

    def _staged(self, save: str) -> dict[str, int]:
        prefix = self._key(f"{save}/")
        return {key.removeprefix(prefix): size for key, size in self._store.sizes(prefix).items()}

    def _publish(self, save: str, metadata: bytes, manifest: bytes) -> None:
        self._store.put(self._key(f"{save}/{MANIFEST_NAME}"), manifest)
        failpoint("dcp.publishing")
        self._store.put(self._key(METADATA), metadata)
        failpoint("dcp.published")
        self._delete_others(save)

    def _delete_others(self, save: str) -> None:
        with contextlib.suppress(OSError):
            folders = [(name, name.partition("/")[0]) for name in self.sizes()]
            self._store.delete([self._key(name) for name, one in folders if one != save and _SAVE.fullmatch(one)])

    def discard(self, save: str) -> None:
        """Delete the objects, unless `.metadata` may name them: a call that seems to fail may have been carried out."""
        with contextlib.suppress(OSError):
            keys = list(self._store.sizes(self._key(f"{save}/")))
            if self._key(f"{save}/{MANIFEST_NAME}") not in keys:
                self._store.delete(keys)

    def _read_attempt(self) -> bytes | None:
        return self._store.get(f"{_OWN}/attempt")

    def _put_attempt(self, data: bytes) -> None:
        self._store.put(f"{_OWN}/attempt", data)

    def _sweep(self, attempt: int) -> None:
        """Delete what older attempts have uploaded below this name and not published."""
        metadata, sizes = self.read(METADATA), self.sizes()
        named: set[str] = set()
        with contextlib.suppress(InvalidCheckpoint):
            named = {file.name.partition("/")[0] for file in self._found(metadata).manifest.files}
        if metadata is None or named:
            old = [
                self._key(name)
                for name in sizes
                if (folder := name.partition("/")[0]) not in named
                and (found := _SAVE.fullmatch(folder))
                and int(found[1]) < attempt
            ]
            self._store.delete(old)

    def read(self, name: str) -> bytes | None:
        """Get the object."""
        return self._store.get(self._key(name))

    def file(self, entry: FileEntry) -> RemoteFile:
        """Return the object."""
        return ObjectFile(self._store, self._key(entry.name), entry.size)

    def sizes(self) -> dict[str, int]:
        """List the prefix."""
        prefix = self._key("")
        return {key.removeprefix(prefix): size for key, size in self._store.sizes(prefix).items()}

    def quarantine(self) -> str:
        """Move `.metadata` into the folder of its files: without it, nothing finds them."""
        data = self.read(METADATA)
        aside = self._key(f"{_OWN}.{uuid.uuid4().hex[:12]}")
        if data is not None:
            self._store.put(aside, data)
            self._store.delete([self._key(METADATA)])
        return f"{self._store.location}/{aside}"

    def _key(self, name: str) -> str:
        return f"{self.name}/{name}"


class _Upload(io.RawIOBase):
    """A file that is uploaded in parts by a thread while it is written.

    Args:
        store: Where to.
        key: Of the object.
    """

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._parts: queue.Queue[bytes | None] = queue.Queue(2)
        self._part, self._nbytes = bytearray(), 0
        self._error: BaseException | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, args=(store, key), name="dcp-upload", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._nbytes

    def write(self, data: Any, /) -> int:
        """Add bytes; raises OSError where earlier ones could not be uploaded."""
        view = memoryview(data).cast("B")
        self._part += view
        self._nbytes += len(view)
        if len(self._part) >= PART_BYTES:
            self._send()
        return len(view)

    def _send(self) -> None:
        if self._error is not None:
            raise self._error
        part, self._part = bytes(self._part), bytearray()
        self._parts.put(part)

    def finish(self) -> None:
        """Wait until all of it is stored; raises OSError where it cannot be."""
        self._send()
        self._parts.put(None)
        self._thread.join()
        failpoint("dcp.written")
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Have nothing stored."""
        self._is_given_up = True
        self._parts.put(None)
        self._thread.join()

    def _run(self, store: ObjectStore, key: str) -> None:
        try:
            store.upload(key, self._pieces())
        except BaseException as error:
            self._error = error
            # The writer must not wait for a queue that nobody empties.
            while self._parts.get() is not None:
                pass

    def _pieces(self) -> Iterator[memoryview]:
        while (part := self._parts.get()) is not None:
            if part:
                yield memoryview(part)
        if self._is_given_up:
            # Put back: the loop that empties the queue waits for it.
            self._parts.put(None)
            raise InterruptedError("given up")


def open_folder(checkpoint_id: str | os.PathLike[str]) -> CheckpointFolder:
    """Return the folder of a `checkpoint_id`: a path, or a URL of any storage that checkpoints may be kept in.

    Raises:
        ValueError: The scheme is unknown, or a package is missing.
    """
    text = os.fspath(checkpoint_id)
    if "://" not in text:
        return LocalFolder(Path(text))
    parent, _, name = text.rstrip("/").rpartition("/")
    storage = open_storage(parent)
    if storage.store is not None:
        return ObjectFolder(storage.store, name)
    assert storage.root is not None
    return LocalFolder(storage.root / name)


class DigestedFile:
    """A file that is digested while it is written.

    Args:
        file: Takes the bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest = file, RunningDigest()
        self._nbytes = 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._file.write(view)
        self._nbytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._nbytes

    def flush(self) -> None:
        """Do nothing: the file is synced when it is whole."""

    def close(self) -> None:
        """Do nothing: the file is closed by what has opened it."""

    def entry(self, name: str) -> FileEntry:
        """Return what a manifest says of the file."""
        return FileEntry(name, self._nbytes, self._digest.result())


def entry_of(name: str, data: bytes) -> FileEntry:
    """Return what a manifest says of a small file."""
    return FileEntry(name, len(data), digest_buffer(data))
