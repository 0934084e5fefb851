"""A store that confirms what it does not keep, and listings that do not end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from chaos.stores import MemoryObjects
from contract.support import commit

from checkpointing.errors import CommitFailed
from checkpointing.storage import s3
from checkpointing.storage.object_storage import ObjectStorage
from checkpointing.storage.object_store import StorageError
from checkpointing.storage.s3 import S3Store


class Dropping(MemoryObjects):
    """Says that it has stored what it was sent, and keeps nothing of certain objects, or only a part."""

    def __init__(self, pattern: str, kept: int | None = None) -> None:
        super().__init__()
        self.pattern, self.kept = pattern, kept

    def _drop(self, key: str) -> None:
        if re.search(self.pattern, key):
            data = self.objects.pop(key)
            if self.kept is not None:
                self.objects[key] = data[: self.kept]

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        stored = super().put(key, data, if_absent=if_absent)
        self._drop(key)
        return stored

    def upload(self, key: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        sent = super().upload(key, pieces, nbytes)
        self._drop(key)
        return sent


@pytest.mark.parametrize(
    ("pattern", "kept", "said"),
    [
        ("/model$", None, "/model: 100 bytes were acknowledged, and the store lists no such object"),
        ("/state$", 3, "the store lists 3 bytes"),
        (r"manifest\.json$", None, "manifest.json was acknowledged, and is not there"),
    ],
)
@pytest.mark.parametrize("honours", [True, False])
def test_what_a_store_drops_silently_is_not_reported_as_committed(
    pattern: str, kept: int | None, said: str, honours: bool
) -> None:
    """A run whose uploads went nowhere ended with 0."""
    store = Dropping(pattern, kept)
    store.honours_if_absent = honours
    storage = ObjectStorage(store)
    storage.begin_attempt(1)
    with pytest.raises(CommitFailed, match=re.escape(said)):
        commit(storage, 1, nbytes=100)
    assert storage.steps() == []
    store.pattern = "nothing"
    assert commit(storage, 2, nbytes=100).step == 2 and storage.steps() == [2]


class Pages:
    """A client whose listing has these pages, the last of them without an end."""

    prefix = "run/"

    def __init__(self, *pages: dict[str, Any]) -> None:
        self.pages = list(pages)
        self.asked = 0

    def call(self, name: str, key: None, **arguments: Any) -> dict[str, Any]:
        self.asked += 1
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        return {"NextContinuationToken": str(self.asked), **page}


def listed(*pages: dict[str, Any]) -> tuple[dict[str, int], int]:
    store = object.__new__(S3Store)
    store.location = "s3://bucket/run"
    client: Any = Pages(*pages)
    store._client = client
    return store.sizes(), client.asked


PAGE = {"Contents": [{"Key": "run/a", "Size": 1}], "IsTruncated": True}
EMPTY: dict[str, Any] = {"Contents": [], "IsTruncated": True}
LAST = {"Contents": [{"Key": "run/b", "Size": 2}], "IsTruncated": False}


def test_a_listing_may_have_many_pages_and_some_empty_ones() -> None:
    """S3's own are empty where many objects were deleted."""
    many = [{"Contents": [{"Key": f"run/{n}", "Size": n}], "IsTruncated": True} for n in range(3 * s3._IDLE_PAGES)]
    found, asked = listed(*many, *[EMPTY] * s3._IDLE_PAGES, LAST)
    assert (len(found), asked) == (3 * s3._IDLE_PAGES + 1, 4 * s3._IDLE_PAGES + 1)


@pytest.mark.parametrize("page", [PAGE, EMPTY, {**PAGE, "NextContinuationToken": ""}])
def test_a_listing_that_does_not_end_is_an_error(page: dict[str, Any]) -> None:
    """A start against such a server waited for ever."""
    with pytest.raises(StorageError, match="s3://bucket/run: the server's listing does not end"):
        listed(page)
