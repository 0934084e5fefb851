"""An object store that is a dict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from checkpointing.storage.object_store import ObjectMissing, StorageError


class MemoryUploads:
    """See `SharedUploads`. A receipt is the number of a part."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.open: dict[str, dict[int, bytes]] = {}
        self._objects, self._numbers = objects, itertools.count()

    def begin(self, key: str) -> str:
        upload = f"{key} {next(self._numbers)}"
        self.open[upload] = {}
        return upload

    def send(self, key: str, upload: str, first: int, parts: Sequence[memoryview]) -> list[int]:
        if upload not in self.open:
            raise StorageError(f"{key}: this upload is over")
        self.open[upload] |= {number: bytes(part) for number, part in enumerate(parts, first)}
        return list(range(first, first + len(parts)))

    def complete(self, key: str, upload: str, receipts: Sequence[int], nbytes: int) -> None:
        parts = self.open.pop(upload)
        self._objects[key] = b"".join(parts[number] for number in receipts)
        if len(self._objects[key]) != nbytes:
            raise StorageError(f"{key}: parts are missing")

    def abort(self, key: str, upload: str) -> None:
        self.open.pop(upload, None)


class MemoryObjects:
    """See `ObjectStore`."""

    location = "memory://here"
    honours_if_absent = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.shared_uploads = MemoryUploads(self.objects)
        self.transferred: Callable[[int], None] = lambda nbytes: None
        self.retried: Callable[[str], None] = lambda reason: None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        if if_absent and key in self.objects:
            return False
        self.objects[key] = data
        return True

    def upload(self, key: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        self.objects[key] = b"".join(pieces)
        return len(self.objects[key])

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        data = self.objects.get(key, b"")[start : start + len(target)]
        if len(data) != len(target):
            raise ObjectMissing(f"{self.location}/{key} is missing or too short")
        target[:] = data

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {key: len(data) for key, data in self.objects.items() if key.startswith(folder)}

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def abort_uploads(self, among: Callable[[str], bool] = lambda key: True) -> int:
        return 0
