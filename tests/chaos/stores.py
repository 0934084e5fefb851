"""An object store that is a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from checkpointing.storage.object_store import ObjectMissing


class MemoryObjects:
    """See `ObjectStore`."""

    location = "memory://here"
    honours_if_absent = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.transferred: Callable[[int], None] = lambda nbytes: None
        self.retried: Callable[[str], None] = lambda reason: None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        if if_absent and key in self.objects:
            return False
        self.objects[key] = data
        return True

    def upload(self, key: str, pieces: Iterable[memoryview]) -> int:
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
