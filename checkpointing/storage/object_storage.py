"""Checkpoints in object storage.

    <location>/checkpoint-<step>/manifest.json                  the commit point, put last, only if absent
    <location>/checkpoint-<step>/<attempt>.<nonce>/<file>       what it names; no two saves share a folder
    <location>/checkpoint-<step>/manifest.<label>.<nonce>.json  quarantined: kept, but nothing resumes from it
    <location>/fence/<attempt>.json                             an attempt has begun: see `Fence`
    <location>/runner.json                                      the run's restart state

There is no rename, so a checkpoint is what its manifest names.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpointing.errors import CommitConflict, Fenced, InvalidCheckpoint
from checkpointing.format.digest import PART_BYTES, chunks, num_parts
from checkpointing.format.manifest import MANIFEST_NAME, Manifest
from checkpointing.host.failpoints import failpoint
from checkpointing.storage.base import CHECKPOINT_PREFIX, NUMBER, Storage
from checkpointing.storage.fence import Fence
from checkpointing.storage.object_store import ObjectFile, ObjectStore, SharedUploads, StorageError, StorageTimeout
from checkpointing.storage.rates import Rates, dead_trials, measure_objects, trial_name
from checkpointing.storage.sidecars import ObjectSidecars

_MANIFEST = re.compile(rf"{CHECKPOINT_PREFIX}({NUMBER})/{re.escape(MANIFEST_NAME)}\Z")
_QUARANTINED = re.compile(rf"{CHECKPOINT_PREFIX}({NUMBER})/manifest\.(invalid|superseded)\.[0-9a-f]+\.json\Z")
_DATA = re.compile(rf"({CHECKPOINT_PREFIX}{NUMBER}/({NUMBER})\.[0-9a-f]+)/")
_FENCE = re.compile(rf"fence/({NUMBER})\.json\Z")
# A newer fence may replace one that was listed, but not again and again.
_FENCE_LOOKS = 10


class ObjectTransaction:
    """See `Transaction`."""

    def __init__(self, storage: ObjectStorage, step: int, attempt: int, identity: str, *, continues: bool) -> None:
        self._storage, self._store = storage, storage.store
        self._step, self._attempt, self._is_shared = step, attempt, bool(identity)
        self._checkpoint = f"{CHECKPOINT_PREFIX}{step}"
        self._folder = f"{self._checkpoint}/{attempt}.{identity or uuid.uuid4().hex[:12]}"
        self._written: list[str] = []
        # Uploads that were begun for all nodes, by file.
        self._opened: dict[str, str] = {}
        # Whether a manifest may exist that names what was written.
        self._may_be_published = False
        # Whether a manifest was not there that the store had acknowledged.
        self._was_dropped = False
        if continues:
            # Parts of a file that the earlier process did not complete: they are paid for, and not listed.
            self._store.abort_uploads(lambda key: key.startswith(f"{self._folder}/"))

    def write(self, name: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Upload a file."""
        key = f"{self._folder}/{name}"
        self._written.append(key)
        uploaded = self._store.upload(key, pieces, nbytes)
        failpoint("remote.uploaded")
        return uploaded

    def write_note(self, name: str, data: bytes) -> None:
        """Put an object."""
        self._store.put(f"{self._folder}/{name}", data)

    def read_note(self, name: str) -> bytes | None:
        """Get an object."""
        return self._store.get(f"{self._folder}/{name}")

    def withdraw(self, names: Sequence[str]) -> None:
        """Delete the objects."""
        with contextlib.suppress(StorageError):
            self._store.delete([f"{self._folder}/{name}" for name in names])

    def open_split(self, name: str, nbytes: int) -> str:
        """Begin an upload in parts."""
        self._opened[name] = self._uploads.begin(f"{self._folder}/{name}")
        return self._opened[name]

    def write_parts(self, name: str, token: str, first: int, data: memoryview) -> list[Any]:
        """Upload parts."""
        return self._uploads.send(f"{self._folder}/{name}", token, first, list(chunks(data, PART_BYTES)))

    def close_split(self, name: str, token: str, data: memoryview, receipts: Sequence[Any]) -> None:
        """Complete the upload, if every part has a receipt."""
        if len(receipts) != num_parts(len(data)):
            raise StorageError(f"{name}: {len(receipts)} of {num_parts(len(data))} parts were uploaded")
        key = f"{self._folder}/{name}"
        self._written.append(key)
        self._uploads.complete(key, token, receipts, len(data))
        del self._opened[name]

    def drop_split(self, name: str, token: str) -> None:
        """Abort the upload: parts that are sent later are refused."""
        self._uploads.abort(f"{self._folder}/{name}", token)
        self._opened.pop(name, None)

    @property
    def _uploads(self) -> SharedUploads:
        uploads = self._store.shared_uploads
        assert uploads is not None
        return uploads

    def written(self) -> dict[str, int]:
        """List the objects."""
        folder = f"{self._folder}/"
        return {key.removeprefix(folder): size for key, size in self._store.sizes(folder).items()}

    def commit(self, manifest: Manifest) -> None:
        """Put the manifest, between two checks of the fence."""
        data = replace(manifest, folder=self._folder).to_json()
        self._storage.check_fence(self._step, self._attempt)
        self._check_kept(manifest)
        failpoint("remote.publishing")
        if not self._publish(data):
            self._storage.displace_stale(self._step, self._attempt)
            if not self._publish(data):
                # What exists may name the folder of the same save.
                self._may_be_published = self._is_shared
                raise CommitConflict(
                    f"{self._storage.describe(self._step)} exists already; it is kept and this copy is dropped"
                )
        failpoint("remote.published")
        # A newer attempt may have begun in between; then this manifest counts only if that one has seen it.
        try:
            self._storage.check_fence(self._step, self._attempt)
        except Fenced:
            # A newer attempt that has not listed yet what counts may still list this one.
            self._may_be_published = self._storage.fence().admits_step(self._step, self._attempt)
            raise
        if self._was_dropped:
            # No newer attempt has moved it aside.
            raise StorageError(
                f"{self._store.location}/{self._checkpoint}/{MANIFEST_NAME} was acknowledged, and is not there: the "
                "store does not keep what it confirms"
            )
        failpoint("remote.committed")

    def _check_kept(self, manifest: Manifest) -> None:
        """Raise StorageError unless the store lists all files in their size: it has acknowledged each."""
        sizes = self._store.sizes(f"{self._folder}/")
        for file in manifest.files:
            if (found := sizes.get(f"{self._folder}/{file.name}")) != file.size:
                # A newer attempt sweeps what an older one has left.
                self._storage.check_fence(self._step, self._attempt)
                size = "no such object" if found is None else f"{found} bytes"
                raise StorageError(
                    f"{self._store.location}/{self._folder}/{file.name}: {file.size} bytes were acknowledged, and the "
                    f"store lists {size}: it does not keep what it confirms"
                )

    def _publish(self, data: bytes) -> bool:
        """Put the manifest if there is none; return whether it is there now."""
        key = f"{self._checkpoint}/{MANIFEST_NAME}"
        decided_there = self._store.honours_if_absent
        if not decided_there and self._store.get(key) is not None:
            return False
        # Until the answer is known: a call that seems to fail may have been carried out, or may still be.
        self._may_be_published = True
        try:
            stored = self._store.put(key, data, if_absent=True)
        except StorageError as error:
            # Whatever the last answer was, this try or an earlier one may have been carried out: look.
            try:
                found = self._store.get(key)
            except StorageError:
                raise error from None
            if found is None:
                # Without an answer, the call may still be under way.
                self._may_be_published = isinstance(error, StorageTimeout)
                raise
            stored = found == data
        found = self._store.get(key)
        self._was_dropped = stored and found is None
        if self._was_dropped:
            return True
        # The object that exists may be that of an earlier try; and where the server does not decide between two
        # writers, the last one wins.
        self._may_be_published = stored = found == data
        return stored

    def abort(self) -> None:
        """Abort what is being uploaded, and delete what was, unless a manifest may name it."""
        for name, token in list(self._opened.items()):
            self.drop_split(name, token)
        if not self._may_be_published:
            written, self._written = self._written, []
            # No manifest names what cannot be deleted now: the next sweep finds it.
            with contextlib.suppress(StorageError):
                self._store.delete(list(self._store.sizes(f"{self._folder}/")) if self._is_shared else written)


class ObjectStorage(Storage):
    """Checkpoints in an object store; see `Storage`."""

    writes_at_once = 2
    # Object stores compare what arrives with the checksum that their client sends.
    checks_arrival = True

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.location)
        self.store: ObjectStore = store
        self.sidecars = ObjectSidecars(store)
        self.can_split = store.shared_uploads is not None

    def begin(
        self, step: int, attempt: int, identity: str = "", *, joins: bool = False, continues: bool = False
    ) -> ObjectTransaction:
        """Choose a folder that no other writer uses, or the one of a save that several nodes or processes write."""
        return ObjectTransaction(self, step, attempt, identity, continues=continues)

    @property
    def decides_between_writers(self) -> bool:
        """Whether the server honours "only if absent"."""
        return self.store.honours_if_absent

    def measure(self, checkpoint_bytes: int) -> Rates:
        """Measure by uploading an object, and reading it back."""
        return measure_objects(self.store, checkpoint_bytes)

    def remove_all(self) -> None:
        """Delete all objects below the location."""
        self.store.delete(list(self.store.sizes()))

    def probe(self) -> str | None:
        """Put, get, list and delete an object: every kind of call that a run needs."""
        key, data = trial_name("probe/"), b"written by checkpointing to see what is allowed here"
        self.store.put(key, data)
        try:
            names = self.store.sizes("probe/")
            if self.store.get(key) != data or key not in names:
                raise StorageError(f"{self.location}: what was written there cannot be read back")
        finally:
            self.store.delete([key])
        self.store.delete(dead_trials(names, time.time()))
        if self.store.honours_if_absent:
            return None
        return (
            f"{self.location} does not decide between two writers (it ignores If-None-Match): what was written is read "
            "back, and of two runners that start at the same moment the later one wins"
        )

    def watch(self, transferred: Callable[[int], None]) -> None:
        """Pass the function on to the store."""
        self.store.transferred = transferred

    def watch_retries(self, retried: Callable[[str], None]) -> None:
        """Pass the function on to the store."""
        self.store.retried = retried

    def fence(self) -> Fence:
        """Get the fence with the highest number."""
        for _ in range(_FENCE_LOOKS):
            newest = max(self._fences(), default=0)
            if newest == 0:
                return Fence()
            data = self.store.get(f"fence/{newest}.json")
            if data is not None:
                break
        else:
            raise StorageError(f"{self.location}/fence/{newest}.json is listed, but cannot be read")
        try:
            return Fence.from_json(data)
        except ValueError as error:
            raise StorageError(
                f"{self.location}/fence/{newest}.json: {error}; remove it if no run writes here"
            ) from None

    def describe(self, step: int) -> str:
        """Return the checkpoint's URL."""
        return f"{self.location}/{CHECKPOINT_PREFIX}{step}"

    def directory(self, step: int) -> Path | None:
        """Return None: nothing is on this machine."""
        return None

    def file(self, manifest: Manifest, name: str) -> ObjectFile:
        """Return the object of a file."""
        size = next(file.size for file in manifest.files if file.name == name)
        return ObjectFile(self.store, f"{manifest.folder}/{name}", size)

    def remove(self, step: int) -> None:
        """Delete the manifest, then what it named."""
        folder = f"{CHECKPOINT_PREFIX}{step}/"
        try:
            data = f"{self._manifest(step).folder}/"
        except InvalidCheckpoint:
            data = ""
        self.store.delete([f"{folder}{MANIFEST_NAME}"])
        failpoint("remote.unlisted")
        if data:
            self.store.delete([key for key in self.store.sizes(folder) if key.startswith(data)])

    def refresh(self, step: int) -> None:
        """Give the store's connections up, where it has any of its own."""
        reconnect = getattr(self.store, "reconnect", None)
        if reconnect is not None:
            reconnect()

    def quarantine(self, step: int, label: str = "invalid") -> str:
        """Copy the manifest to `manifest.<label>.<nonce>.json`, then delete it."""
        folder = f"{CHECKPOINT_PREFIX}{step}/"
        data = self.store.get(f"{folder}{MANIFEST_NAME}")
        if data is None:
            raise StorageError(f"{self.describe(step)} has no {MANIFEST_NAME}")
        aside = f"{folder}manifest.{label}.{uuid.uuid4().hex[:12]}.json"
        self.store.put(aside, data)
        failpoint("aside.copied")
        self.store.delete([f"{folder}{MANIFEST_NAME}"])
        return f"{self.location}/{aside}"

    def quarantined(self) -> list[str]:
        """Return the keys of quarantined manifests."""
        return sorted(key for key in self.store.sizes(CHECKPOINT_PREFIX) if _QUARANTINED.match(key))

    def take_back(self, name: str) -> int | None:
        """Put the manifest back, then delete its copy."""
        match = _QUARANTINED.match(name)
        assert match is not None
        data = self.store.get(name)
        own = f"{CHECKPOINT_PREFIX}{match.group(1)}/{MANIFEST_NAME}"
        if data is None or self.store.get(own) is not None or not self.store.put(own, data, if_absent=True):
            return None
        self.store.delete([name])
        return int(match.group(1))

    def sweep(self) -> list[str]:
        """Delete objects that no manifest names, and abort unfinished uploads."""
        keys = self.store.sizes(CHECKPOINT_PREFIX)
        named = set()
        for key in keys:
            if _MANIFEST.match(key) or _QUARANTINED.match(key):
                try:
                    named.add(Manifest.from_json(self.store.get(key) or b"", key).folder)
                except InvalidCheckpoint:
                    # It is unknown what it named: keep everything of that checkpoint.
                    others = (_DATA.match(other) for other in keys if other.startswith(key.split("/")[0] + "/"))
                    named |= {match.group(1) for match in others if match}
        orphans = [
            key
            for key in keys
            if self._is_for_our_sweep(key) and (match := _DATA.match(key)) and match.group(1) not in named
        ]
        self.store.delete(orphans)
        self.store.abort_uploads(self._is_for_our_sweep)
        return sorted({key.rsplit("/", 1)[0] for key in orphans})

    def _is_for_our_sweep(self, key: str) -> bool:
        """Return whether a key is data of this library that may be swept: other objects may be below the location."""
        match = _DATA.match(key)
        return match is not None and self._claim.outlives(int(match.group(2)))

    def _put_fence(self, fence: Fence) -> None:
        key, data = f"fence/{fence.attempt}.json", fence.to_json()
        self.store.put(key, data, if_absent=fence.oldest < fence.attempt)
        # Another process may have put it first, or, where the server does not decide, last.
        if self.store.get(key) != data:
            raise Fenced(fence.attempt, self.location, fence.attempt)
        if fence.oldest < fence.attempt:
            return
        self.store.delete([f"fence/{older}.json" for older in self._fences() if older < fence.attempt])
        # Find this out now, not during the first save.
        _ = self.store.honours_if_absent

    def _manifest(self, step: int) -> Manifest:
        place = self.describe(step)
        data = self.store.get(f"{CHECKPOINT_PREFIX}{step}/{MANIFEST_NAME}")
        if data is None:
            raise InvalidCheckpoint(place, f"no {MANIFEST_NAME}: it was never committed")
        return Manifest.from_json(data, place)

    def watch_location(self) -> None:
        """Do nothing: a bucket has no directories."""

    def has_step(self, step: int) -> bool:
        """Return whether there is a manifest of that step; the others are not listed."""
        return step in self._steps(self._sizes(step))

    def _sizes(self, step: int | None = None) -> dict[str, int]:
        return self.store.sizes(CHECKPOINT_PREFIX if step is None else f"{CHECKPOINT_PREFIX}{step}/")

    def _steps(self, sizes: Mapping[str, int]) -> set[int]:
        return {int(match.group(1)) for key in sizes if (match := _MANIFEST.match(key))}

    def _fences(self) -> list[int]:
        return sorted(int(match.group(1)) for key in self.store.sizes("fence/") if (match := _FENCE.match(key)))
