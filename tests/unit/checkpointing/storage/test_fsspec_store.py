"""Any fsspec file system as an object store; what all stores must keep is in tests/contract."""

from __future__ import annotations

import errno
import threading
import uuid

import pytest

from checkpointing.storage import fsspec_store
from checkpointing.storage.fsspec_store import FilesystemStore
from checkpointing.storage.object_store import StorageError, StorageTimeout


@pytest.fixture
def store() -> FilesystemStore:
    return FilesystemStore(f"memory://{uuid.uuid4().hex}/run/")


def test_keys_are_below_the_location(store: FilesystemStore) -> None:
    store.put("a/b", b"1")
    assert not store.put("a/b", b"2", if_absent=True)
    assert store.put("a/b", b"345")
    assert store.sizes() == {"a/b": 3} and store.sizes("b") == {} and store.get("a/b") == b"345"
    store.delete(["a/b", "never/there"])
    assert store.sizes() == {} and store.get("a/b") is None


def test_a_back_end_that_does_not_answer_is_left_behind(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(fsspec_store, "_DEADLINE_S", 0.01)
    with pytest.raises(StorageTimeout, match=r"list at memory://.*: no answer for 0 s"):
        store._call("list", lambda fs, root: release.wait(60))
    release.set()


def test_whatever_a_back_end_raises_is_an_error_of_storage(store: FilesystemStore) -> None:
    def broken(fs: object, root: str) -> None:
        raise KeyError("token")

    with pytest.raises(StorageError, match=r"list at memory://.*: 'token'"):
        store._call("list", broken)


class Answer(Exception):
    def __init__(self, code: object) -> None:
        self.code = code


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (Answer(503), True),
        (Answer(429), True),
        (Answer(403), False),
        (Answer("notFound"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_a_server_that_is_away_is_told_from_one_that_refuses(
    error: Exception, is_away: bool, store: FilesystemStore
) -> None:
    def broken(fs: object, root: str) -> None:
        raise error

    with pytest.raises(StorageError) as caught:
        store._call("list", broken)
    assert isinstance(caught.value, StorageTimeout) is is_away


@pytest.mark.parametrize("location", ["no://host/x", "nosuch+scheme://x"])
def test_a_scheme_that_is_not_known_is_refused(location: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        FilesystemStore(location)
