"""Checkpoints in object storage.

    <location>/checkpoint-<step>/manifest.json                  the commit point, put last, only if absent
    <location>/checkpoint-<step>/<attempt>.<nonce>/<file>       what it names; no two writers share a folder
    <location>/checkpoint-<step>/manifest.<label>.<nonce>.json  set aside: kept, but nothing resumes from it
    <location>/fence/<attempt>.json                             an attempt has begun: see `Fence`

There is no rename, so a checkpoint is what its manifest names.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.errors import CommitConflict, Fenced, InvalidCheckpoint
from checkpointing.manifest import MANIFEST_NAME, Manifest
from checkpointing.storage.base import CHECKPOINT_PREFIX, Fence
from checkpointing.storage.objects import ObjectStore, StorageError, StorageTimeout

_MANIFEST = re.compile(rf"^{CHECKPOINT_PREFIX}(\d+)/{re.escape(MANIFEST_NAME)}$")
_ASIDE = re.compile(rf"^{CHECKPOINT_PREFIX}(\d+)/manifest\.(invalid|superseded)\.[0-9a-f]+\.json$")
_DATA = re.compile(rf"^({CHECKPOINT_PREFIX}\d+/(\d+)\.[0-9a-f]+)/")
_FENCE = re.compile(r"^fence/(\d+)\.json$")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a checkpoint, read by ranges."""

    store: ObjectStore
    key: str
    nbytes: int

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from `start` on.

        Raises:
            OSError: it cannot be read.
        """
        self.store.read_into(self.key, start, target)


class RemoteTransaction:
    """See `Transaction`."""

    def __init__(self, storage: RemoteStorage, step: int, attempt: int) -> None:
        self._storage, self._store = storage, storage.store
        self._attempt = attempt
        self._checkpoint = f"{CHECKPOINT_PREFIX}{step}"
        self._folder = f"{self._checkpoint}/{attempt}.{uuid.uuid4().hex[:12]}"
        self._written: list[str] = []
        self._finished = False

    def write(self, name: str, pieces: Iterable[memoryview]) -> int:
        key = f"{self._folder}/{name}"
        self._written.append(key)
        return self._store.upload(key, pieces)

    def commit(self, manifest: Manifest) -> None:
        manifest = replace(manifest, folder=self._folder)
        data = manifest.to_json()
        self._check_fence(manifest.step)
        if not self._publish(data):
            self._make_way(manifest.step)
            if not self._publish(data):
                raise CommitConflict(
                    f"{self._storage.describe(manifest.step)} exists already; it is kept and this copy is dropped"
                )
        self._finished = True
        # A newer attempt may have begun in between; then this manifest counts only if that one has seen it.
        try:
            self._check_fence(manifest.step)
        except Fenced:
            self._finished = False
            raise

    def _check_fence(self, step: int) -> None:
        fence = self._storage.fence()
        if not fence.admits_step(step, self._attempt):
            raise Fenced(fence.attempt, self._storage.location, self._attempt)

    def _publish(self, data: bytes) -> bool:
        """Put the manifest where none is; whether it is there now."""
        key = f"{self._checkpoint}/{MANIFEST_NAME}"
        if not self._store.honours_if_absent and self._store.get(key) is not None:
            return False
        try:
            self._store.put(key, data, if_absent=True)
        except StorageTimeout:
            # Whether it was stored is not known; what is there now tells.
            if self._store.get(key) is None:
                raise
        # Our own earlier try may have been the one that was there; and where the server does not decide between two
        # writers, the last one wins.
        return self._store.get(key) == data

    def _make_way(self, step: int) -> None:
        """What an older attempt published too late holds the place, but does not count."""
        try:
            self._storage.read_manifest(step)
        except InvalidCheckpoint:
            with contextlib.suppress(StorageError):
                self._storage.set_aside(step)

    def abort(self) -> None:
        if not self._finished:
            written, self._written = self._written, []
            try:
                self._store.delete(written)
            except StorageError:
                # The next sweep finds them: no manifest names them.
                return


class RemoteStorage:
    """See `Storage`."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.location = store.location

    def begin(self, step: int, attempt: int) -> RemoteTransaction:
        return RemoteTransaction(self, step, attempt)

    def probe(self) -> None:
        self.store.probe()

    def begin_attempt(self, attempt: int, held: Iterable[tuple[int, int]] = ()) -> None:
        """Fence all older attempts: from now on they publish nothing.

        Raises:
            OSError: storage refused, or a newer attempt has begun.
        """
        fence = self.fence()
        if fence.attempt >= attempt:
            raise Fenced(fence.attempt, self.location, attempt)
        data = fence.next(attempt, self._published(), held, uuid.uuid4().hex).to_json()
        key = f"fence/{attempt}.json"
        self.store.put(key, data, if_absent=True)
        # Somebody else may have put it first, or, where the server does not decide, last.
        if self.store.get(key) != data:
            raise Fenced(attempt, self.location, attempt)
        self.store.delete([f"fence/{older}.json" for older in self._fences() if older < attempt])

    def steps(self) -> list[int]:
        matches = (_MANIFEST.match(key) for key in self.store.sizes(CHECKPOINT_PREFIX))
        return sorted(int(match.group(1)) for match in matches if match)

    def read_manifest(self, step: int) -> Manifest:
        place = self.describe(step)
        manifest = self._manifest(step)
        if manifest.step != step:
            raise InvalidCheckpoint(place, f"{MANIFEST_NAME} is of step {manifest.step}")
        if not self.fence().admits(manifest):
            raise InvalidCheckpoint(place, f"attempt {manifest.attempt} published it after a newer one had begun")
        sizes = self.store.sizes(f"{CHECKPOINT_PREFIX}{step}/")
        for file in manifest.files:
            size = sizes.get(f"{manifest.folder}/{file.name}")
            if size is None:
                raise InvalidCheckpoint(place, f"{file.name} cannot be read (there is no such object)")
            if size != file.size:
                raise InvalidCheckpoint(place, f"{file.name} has {size} bytes, the manifest says {file.size}")
        return manifest

    def describe(self, step: int) -> str:
        return f"{self.location}/{CHECKPOINT_PREFIX}{step}"

    def directory(self, step: int) -> Path | None:
        return None

    def file(self, manifest: Manifest, name: str) -> RemoteFile:
        size = next(file.size for file in manifest.files if file.name == name)
        return RemoteFile(self.store, f"{manifest.folder}/{name}", size)

    def remove(self, step: int) -> None:
        folder = f"{CHECKPOINT_PREFIX}{step}/"
        try:
            data = f"{self._manifest(step).folder}/"
        except InvalidCheckpoint:
            data = ""
        self.store.delete([f"{folder}{MANIFEST_NAME}"])
        if data:
            self.store.delete([key for key in self.store.sizes(folder) if key.startswith(data)])

    def set_aside(self, step: int, label: str = "invalid") -> str:
        folder = f"{CHECKPOINT_PREFIX}{step}/"
        data = self.store.get(f"{folder}{MANIFEST_NAME}")
        if data is None:
            raise StorageError(f"{self.describe(step)} has no {MANIFEST_NAME}")
        aside = f"{folder}manifest.{label}.{uuid.uuid4().hex[:12]}.json"
        self.store.put(aside, data)
        self.store.delete([f"{folder}{MANIFEST_NAME}"])
        return f"{self.location}/{aside}"

    def set_aside_names(self) -> list[str]:
        return sorted(key for key in self.store.sizes(CHECKPOINT_PREFIX) if _ASIDE.match(key))

    def sweep(self) -> list[str]:
        keys = self.store.sizes(CHECKPOINT_PREFIX)
        named = set()
        for key in keys:
            if _MANIFEST.match(key) or _ASIDE.match(key):
                try:
                    named.add(Manifest.from_json(self.store.get(key) or b"", key).folder)
                except InvalidCheckpoint:
                    # What it named is not known: keep everything beside it.
                    beside = (_DATA.match(other) for other in keys if other.startswith(key.split("/")[0] + "/"))
                    named |= {match.group(1) for match in beside if match}
        orphans = [key for key in keys if (match := _DATA.match(key)) and match.group(1) not in named]
        self.store.delete(orphans)
        self.store.abort_uploads()
        return sorted({key.rsplit("/", 1)[0] for key in orphans})

    # -- inside --------------------------------------------------------------------------------------------------

    def _manifest(self, step: int) -> Manifest:
        place = self.describe(step)
        data = self.store.get(f"{CHECKPOINT_PREFIX}{step}/{MANIFEST_NAME}")
        if data is None:
            raise InvalidCheckpoint(place, f"no {MANIFEST_NAME}: it was never committed")
        return Manifest.from_json(data, place)

    def _published(self) -> Iterator[Manifest]:
        for step in self.steps():
            with contextlib.suppress(InvalidCheckpoint):
                yield self._manifest(step)

    def _fences(self) -> list[int]:
        return sorted(int(match.group(1)) for key in self.store.sizes("fence/") if (match := _FENCE.match(key)))

    def fence(self) -> Fence:
        newest = max(self._fences(), default=0)
        if newest == 0:
            return Fence()
        data = self.store.get(f"fence/{newest}.json")
        if data is None:
            return self.fence()
        try:
            return Fence.from_json(data)
        except ValueError as error:
            raise StorageError(
                f"{self.location}/fence/{newest}.json: {error}; remove it if no run writes here"
            ) from None
