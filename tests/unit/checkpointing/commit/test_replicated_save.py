"""Which parts of a file each node writes, and what becomes of a save in which a node fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from chaos.stores import MemoryObjects

from checkpointing.commit import replicated_save as split
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.replicated_save import (
    LEAST_BYTES,
    MOST_PARTS,
    ReplicatedCommit,
    ReplicatedSave,
    is_split,
    write_portion,
)
from checkpointing.errors import CommitFailed
from checkpointing.format.digest import PART_BYTES, num_parts
from checkpointing.format.manifest import FileEntry, Manifest, SnapshotInfo
from checkpointing.format.shard_index import HeldFile, ShardParts
from checkpointing.storage import Storage, open_storage
from checkpointing.storage.base import Transaction
from checkpointing.storage.object_storage import ObjectStorage

INFO = SnapshotInfo("run", 1, 7, 2, 7)
DATA = b"state" * (PART_BYTES // 5) + b"and a second part"


@pytest.fixture(params=["disk", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "store")) if request.param == "disk" else ObjectStorage(MemoryObjects())


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("num", [1, 2, 3, 7, 8, 64, 101])
def test_each_part_is_one_nodes(nodes: int, num: int) -> None:
    portions = [ReplicatedSave("ab", node, nodes, ()).portion(num * PART_BYTES - 5) for node in range(nodes)]
    assert [number for portion in portions for number in portion] == list(range(num))
    assert max(map(len, portions)) - min(map(len, portions)) <= 1


def test_neither_small_files_nor_those_of_too_many_parts_are_split() -> None:
    sizes = [LEAST_BYTES - 1, LEAST_BYTES, MOST_PARTS * PART_BYTES, MOST_PARTS * PART_BYTES + 1]
    assert [is_split(nbytes) for nbytes in sizes] == [False, True, True, False]


def whole(data: bytes = DATA) -> HeldFile:
    return HeldFile("model", memoryview(data), lambda: ShardParts.of(memoryview(data)))


def commit(storage: Storage, save: ReplicatedCommit, data: bytes = DATA) -> Manifest:
    parts = ShardParts.of(memoryview(data))
    files = [
        StagedFile("model", [memoryview(data)], lambda: parts.digest),
        StagedFile("small", [memoryview(b"s")], lambda: ShardParts.of(memoryview(b"s")).digest),
    ]
    return commit_snapshot(storage, INFO, files, save=save)


def both(
    storage: Storage, save: ReplicatedCommit, other: HeldFile
) -> tuple[Manifest | BaseException, BaseException | None]:
    """Run both nodes; return what the one that commits says, and the other's error."""
    with ThreadPoolExecutor(1) as pool:
        helping = pool.submit(write_portion, storage, INFO, ReplicatedSave("ab", 1, 2, ("model",)), [other])
        try:
            return commit(storage, save), helping.exception()
        except CommitFailed as error:
            return error, helping.exception()


def names_left(storage: Storage) -> list[str]:
    """Names of files that no manifest names."""
    if isinstance(storage, ObjectStorage):
        assert isinstance(storage.store, MemoryObjects)
        return [*storage.store.shared_uploads.open, *(key for key in storage.store.objects if ".split" in key)]
    assert storage.root is not None
    return [str(path) for path in storage.root.rglob(".*") if not path.name.startswith(".fence")]


def test_both_write_and_one_commits(storage: Storage) -> None:
    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    manifest, error = both(storage, save, whole())
    assert isinstance(manifest, Manifest) and error is None
    assert (save.gave_up, save.nodes_that_write) == (None, 2)
    assert {file.name for file in Catalog(storage).verify(7).files} == {"model", "small"}
    assert names_left(storage) == []


def test_who_is_not_there_costs_time_only(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "PATIENCE_S", 0.1)
    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    commit(storage, save)
    assert save.gave_up is not None and "has not written its part" in save.gave_up
    assert save.nodes_that_write == 1
    assert Catalog(storage).verify(7).total_bytes == len(DATA) + 1
    assert names_left(storage) == []


def test_who_cannot_write_says_so(storage: Storage) -> None:
    def refuse() -> ShardParts:
        raise OSError(28, "No space left on device")

    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    manifest, error = both(storage, save, HeldFile("model", memoryview(DATA), refuse))
    assert isinstance(manifest, Manifest) and isinstance(error, OSError)
    assert save.gave_up == "another node could not write its part: No space left on device"
    Catalog(storage).verify(7)


def test_who_comes_late_reaches_nothing(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be damaged: not a byte of it may get into what is committed."""
    monkeypatch.setattr(split, "PATIENCE_S", 0.1)
    tokens: dict[str, str] = {}
    began = ReplicatedCommit.begin

    def begin(self: ReplicatedCommit, storage: Storage, info: SnapshotInfo) -> Transaction:
        transaction = began(self, storage, info)
        tokens.update(self._tokens)
        return transaction

    monkeypatch.setattr(ReplicatedCommit, "begin", begin)
    commit(storage, ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()]))
    late = storage.begin(7, 1, "ab", joins=True)
    with pytest.raises(OSError):
        late.write_parts("model", tokens["model"], 1, memoryview(b"damaged"))
    Catalog(storage).verify(7)


def test_other_bytes_are_found_and_are_not_in_the_checkpoint(storage: Storage) -> None:
    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    manifest, error = both(storage, save, whole(DATA[:-1] + b"!"))
    assert isinstance(manifest, Manifest) and error is None
    assert save.gave_up is not None and "another node holds other bytes of model" in save.gave_up
    assert Catalog(storage).verify(7).files[0].digest == ShardParts.of(memoryview(DATA)).digest


def test_a_report_without_a_file_is_none(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk its parts would be zeros."""
    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    own = storage.begin(7, 1, "ab", joins=True)
    monkeypatch.setattr(
        ReplicatedCommit,
        "write",
        _after(ReplicatedCommit.write, lambda: own.write_note(".split.1.json", b'{"files": {}}')),
    )
    commit(storage, save)
    assert save.gave_up is not None and "other bytes" in save.gave_up
    Catalog(storage).verify(7)


def _after(method: Callable[..., int], then: Callable[[], None]) -> Callable[..., int]:
    def both(*arguments: Any) -> int:
        result = method(*arguments)
        then()
        return result

    return both


def test_parts_that_are_not_where_the_other_node_wrote_them_are_found(tmp_path: Path) -> None:
    """A mount that keeps whole objects: the last one that is closed replaces the other."""
    storage = open_storage(str(tmp_path))
    own = storage.begin(7, 1, "ab")
    token = own.open_split("model", len(DATA))
    own.write_parts("model", token, 0, memoryview(DATA)[:PART_BYTES])
    with pytest.raises(OSError, match="does each see what others write"):
        own.close_split("model", token, memoryview(DATA), [])


def test_an_upload_that_lacks_parts_is_not_completed() -> None:
    own = ObjectStorage(MemoryObjects()).begin(7, 1, "ab")
    token = own.open_split("model", len(DATA))
    receipts = own.write_parts("model", token, 0, memoryview(DATA)[:PART_BYTES])
    with pytest.raises(OSError, match="1 of 2 parts were uploaded"):
        own.close_split("model", token, memoryview(DATA), receipts)


@pytest.mark.parametrize("method", ["open_split", "write_parts", "close_split"])
def test_a_place_that_cannot_do_it_after_all_gets_whole_files(
    method: str, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(type(storage.begin(1, 1, "ab", joins=True)), method, refuse)
    monkeypatch.setattr(split, "PATIENCE_S", 0.1)
    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    both(storage, save, whole()) if method == "close_split" else commit(storage, save)
    assert save.gave_up is not None and "Operation not supported" in save.gave_up
    Catalog(storage).verify(7)
    assert names_left(storage) == []


def test_a_node_without_parts_has_nothing_to_do(storage: Storage) -> None:
    save = ReplicatedCommit(ReplicatedSave("ab", 1, 3, ("model",)), [whole()])
    assert [len(save._save.portion(len(DATA), node)) for node in range(3)] == [0, 1, 1]
    assert write_portion(storage, INFO, ReplicatedSave("ab", 0, 3, ("model",)), [whole()])
    with ThreadPoolExecutor(1) as pool:
        helping = pool.submit(write_portion, storage, INFO, ReplicatedSave("ab", 2, 3, ("model",)), [whole()])
        commit(storage, save)
        assert helping.result()
    assert (save.gave_up, save.nodes_that_write) == (None, 2)


def test_a_node_whose_attempt_is_over_stops_waiting(storage: Storage) -> None:
    storage.begin_attempt(1)
    assert write_portion(storage, INFO, ReplicatedSave("ab", 1, 2, ("model",)), [whole()], lambda: False)


def test_a_part_that_is_sent_twice_counts_once(storage: Storage) -> None:
    own = storage.begin(7, 1, "ab")
    token, (first, second) = own.open_split("model", len(DATA)), (DATA[:PART_BYTES], DATA[PART_BYTES:])
    receipts = own.write_parts("model", token, 0, memoryview(first))
    other = storage.begin(7, 1, "ab", joins=True)
    other.write_parts("model", token, 1, memoryview(second))
    receipts += other.write_parts("model", token, 1, memoryview(second))
    own.close_split("model", token, memoryview(DATA), receipts)
    parts = ShardParts.of(memoryview(DATA))
    assert num_parts(len(DATA)) == 2
    own.commit(Manifest(**asdict(INFO), created_at=0.0, files=(FileEntry("model", len(DATA), parts.digest),)))
    Catalog(storage).verify(7)


def test_a_save_that_is_given_up_leaves_nothing(storage: Storage) -> None:
    save = ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), [whole()])
    with pytest.raises(CommitFailed, match="quota"):
        commit_snapshot(storage, INFO, [StagedFile("small", _refusing(), lambda: "")], save=save)
    assert names_left(storage) == []


def _refusing() -> Iterator[memoryview]:
    yield memoryview(b"s")
    raise OSError(122, "quota exceeded")


def test_a_node_that_writes_alone_lets_the_others_go_on(storage: Storage) -> None:
    with ThreadPoolExecutor(1) as pool:
        helping = pool.submit(write_portion, storage, INFO, ReplicatedSave("ab", 1, 2, ("model",)), [whole()])
        commit(storage, ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), []))
        assert helping.result()
    Catalog(storage).verify(7)


def test_a_save_that_is_over_is_not_waited_for(storage: Storage) -> None:
    """A node that writes alone may be done before another one has looked: that one waited for 20 s."""
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            commit(storage, ReplicatedCommit(ReplicatedSave("ab", 0, 2, ("model",)), []))

    own = ReplicatedSave("ab", 1, 2, ("model",))
    assert write_portion(storage, INFO, own, [whole()], clock=lambda: sum(slept), sleep=sleep)
    assert len(slept) == 1


def test_a_node_that_finds_no_save_says_so(storage: Storage) -> None:
    times = iter(range(100))
    storage.begin_attempt(1)
    found = write_portion(
        storage,
        INFO,
        ReplicatedSave("ab", 1, 2, ("model",)),
        [whole()],
        clock=lambda: float(next(times)),
        sleep=lambda seconds: None,
    )
    assert not found


@pytest.mark.parametrize(
    ("without", "own", "expected"),
    [
        ((), 0, (0, 3)),
        ((), 4, (2, 3)),
        ((2,), 4, (1, 2)),
        ((2,), 2, None),
        # The one that commits writes from its own memory, without a snapshot, and alone.
        ((0,), 2, None),
        ((2, 4), 0, None),
    ],
)
def test_nodes_that_hold_the_snapshot_write_it_with_the_one_that_commits(
    without: tuple[int, ...], own: int, expected: tuple[int, int] | None
) -> None:
    """Three nodes of two ranks, named by their first one."""
    ranks = [(node, node not in without) for node in (0, 0, 2, 2, 4, 4)]
    split = ReplicatedSave.between(ranks, own, "ab", ("optimizer.pt",))
    assert (None if split is None else (split.node, split.nodes)) == expected
