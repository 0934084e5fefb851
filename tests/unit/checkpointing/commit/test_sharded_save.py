"""The nodes that write one checkpoint: what the one that commits waits for, and for how long."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from chaos.stores import MemoryObjects

from checkpointing.commit import save_notes
from checkpointing.commit.sharded_save import (
    LAST_PATIENCE_S,
    LONGEST_S,
    PATIENCE_S,
    ShardedCommit,
    ShardedSave,
    write_shards,
)
from checkpointing.errors import CommitFailed, DamagedMemory
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import FileEntry, Manifest, SnapshotInfo
from checkpointing.format.shard_index import BEGUN_NAME, HeldFile, ShardParts, parts_name
from checkpointing.storage import LocalStorage
from checkpointing.storage.local_transaction import LocalTransaction
from checkpointing.storage.object_storage import ObjectStorage

INFO = SnapshotInfo("run", 1, 5, 2, 40)
SAVE = ShardedSave("ab12", ("shards/0.bin", "shards/1.bin"))
DATA = b"what rank 1 holds"
PARTS = ShardParts.of(memoryview(DATA))
OWN = FileEntry("shards/0.bin", len(DATA), digest_buffer(DATA))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def transaction(storage: LocalStorage) -> LocalTransaction:
    """That of the node that commits, which has begun."""
    transaction = ShardedCommit(storage, INFO, SAVE).begin(storage, INFO)
    assert isinstance(transaction, LocalTransaction)
    return transaction


def shard(parts: Callable[[], ShardParts] = lambda: PARTS) -> HeldFile:
    return HeldFile("shards/1.bin", memoryview(DATA), parts)


def await_shards(transaction: LocalTransaction, is_current: bool = True, time: Time | None = None) -> list[FileEntry]:
    """What the node that commits does once it has written its own."""
    clocks = {"clock": time.clock, "sleep": time.sleep} if time is not None else {}
    commit = ShardedCommit(LocalStorage(Path()), INFO, SAVE, is_current=lambda: is_current, **clocks)  # type: ignore[arg-type]
    return commit.complete(transaction, lambda: [OWN])[1:]


class Time:
    """A clock that only sleeping moves on; something may happen at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


def test_a_shard_that_another_node_has_written_is_part_of_the_checkpoint(
    storage: LocalStorage, transaction: LocalTransaction
) -> None:
    assert write_shards(storage, INFO, SAVE, [shard()]) == len(DATA)
    note = PARTS.to_json()
    begun = json.dumps({"save": "ab12"}).encode()
    assert await_shards(transaction) == [
        FileEntry(BEGUN_NAME, len(begun), digest_buffer(begun)),
        FileEntry("shards/1.bin", len(DATA), digest_buffer(DATA)),
        FileEntry("shards/1.parts.json", len(note), digest_buffer(note)),
    ]


def test_its_own_memory_is_compared_before_others_are_waited_for(transaction: LocalTransaction) -> None:
    """Otherwise another node that fails as well would hide that, and the snapshot would be resumed from."""

    def damaged() -> list[FileEntry]:
        raise DamagedMemory("checkpoint-5 is damaged in memory")

    with pytest.raises(DamagedMemory):
        ShardedCommit(LocalStorage(Path()), INFO, SAVE).complete(transaction, damaged)


def alive(transaction: LocalTransaction, number: int) -> None:
    transaction.write_note("shards/1.state.json", json.dumps({"alive": [1, number]}).encode())


def test_signs_of_life_are_waited_for_and_silence_is_not(transaction: LocalTransaction) -> None:
    time = Time()
    for number in range(4):
        time.events.append((number * 25.0, functools.partial(alive, transaction, number)))
    with pytest.raises(CommitFailed, match=r"shards/1\.bin was not written: .* no sign of life for 30 s"):
        await_shards(transaction, time=time)
    assert 75 + PATIENCE_S <= time.now < 77 + PATIENCE_S


def test_a_node_that_lives_but_does_not_get_on_is_given_up(transaction: LocalTransaction) -> None:
    time = Time()
    time.events = [(second * 20.0, functools.partial(alive, transaction, second)) for second in range(500)]
    with pytest.raises(CommitFailed, match=r"was not written within 36\d\d s, although its node lives|no sign of life"):
        await_shards(transaction, time=time)
    assert LONGEST_S <= time.now < LONGEST_S + 2


def test_when_its_attempt_is_over_there_is_less_time(transaction: LocalTransaction) -> None:
    time = Time()
    with pytest.raises(CommitFailed, match=r"no other node has written anything here for 5 s. Do all nodes reach"):
        await_shards(transaction, False, time)
    assert time.now < LAST_PATIENCE_S + 1


def test_a_node_waits_for_the_one_that_commits(storage: LocalStorage) -> None:
    """And writes nothing where that one never begins, as in a directory that each node has for itself."""
    time = Time()
    with pytest.raises(CommitFailed, match=r"has not begun this save here for 30 s\. Do all nodes reach this location"):
        write_shards(storage, INFO, SAVE, [shard()], clock=time.clock, sleep=time.sleep)
    assert list(storage.root.iterdir()) == []


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_what_another_node_could_not_write_ends_the_save_at_once(
    storage: LocalStorage, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTransaction, "write", full)
    with pytest.raises(CommitFailed, match=r"share of checkpoint-5 at .* could not be written: No space left"):
        write_shards(storage, INFO, SAVE, [shard()])
    with pytest.raises(CommitFailed, match=r"another node could not write shards/1\.bin: No space left on device"):
        await_shards(transaction)


def test_digests_that_were_stored_are_not_replaced_by_a_later_error(
    storage: LocalStorage, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost: the node that commits may have read them, and the manifest names them."""
    write_note = LocalTransaction.write_note

    def answer_lost(self: LocalTransaction, name: str, data: bytes) -> None:
        write_note(self, name, data)
        if name == "shards/1.parts.json":
            raise OSError(5, "no answer")

    monkeypatch.setattr(LocalTransaction, "write_note", answer_lost)
    assert write_shards(storage, INFO, SAVE, [shard()]) == len(DATA)
    assert transaction.read_note("shards/1.parts.json") == PARTS.to_json()
    # It could come after the checkpoint, and stay in it.
    assert b"error" not in (transaction.read_note("shards/1.state.json") or b"")
    names = [entry.name for entry in await_shards(transaction)]
    assert names == [BEGUN_NAME, "shards/1.bin", "shards/1.parts.json"]


def test_a_checkpoint_that_was_committed_meanwhile_is_no_failure(
    storage: LocalStorage, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that commits needs no more than the name of the last digests, which may not be durable yet."""
    write_note = LocalTransaction.write_note

    def overtaken(self: LocalTransaction, name: str, data: bytes) -> None:
        write_note(self, name, data)
        if name == "shards/1.parts.json":
            entries = await_shards(transaction)
            transaction.commit(Manifest(**asdict(INFO), created_at=0.0, files=tuple(entries)))
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(LocalTransaction, "write_note", overtaken)
    assert write_shards(storage, INFO, SAVE, [shard()]) == len(DATA)
    assert storage.steps() == [5]


def test_a_node_writes_no_more_shards_of_a_save_that_was_given_up() -> None:
    storage = ObjectStorage(MemoryObjects())
    transaction = ShardedCommit(storage, INFO, SAVE).begin(storage, INFO)

    def given_up() -> ShardParts:
        transaction.abort()
        return PARTS

    never = HeldFile("shards/2.bin", memoryview(DATA), lambda: pytest.fail("it is written"))
    with pytest.raises(CommitFailed, match="has given up checkpoint-5"):
        write_shards(storage, INFO, SAVE, [shard(given_up), never])
    assert storage.store.sizes() == {}


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"nbytes": 1, "parts": "00"}'])
def test_digests_that_cannot_be_read_are_an_error(transaction: LocalTransaction, note: bytes) -> None:
    transaction.write_note("shards/1.parts.json", note)
    with pytest.raises(CommitFailed, match="cannot be read"):
        await_shards(transaction)


def test_signs_of_life_end_with_the_digests_and_are_removed(
    storage: LocalStorage, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_notes, "ALIVE_S", 0.001)
    digested = threading.Event()
    seen: set[bytes] = set()

    def parts() -> ShardParts:
        assert digested.wait(10)
        return PARTS

    def written(*_: object) -> int:
        while len(seen) < 3:
            note = transaction.read_note("shards/1.state.json")
            if note is not None:
                seen.add(note)
        digested.set()
        return len(DATA)

    # The shard is written; its digests are not known yet.
    monkeypatch.setattr(LocalTransaction, "write", written)
    write_shards(storage, INFO, SAVE, [shard(parts)])
    assert all(b"alive" in note for note in seen)
    assert transaction.read_note(parts_name("shards/1.bin")) == PARTS.to_json()
    await_shards(transaction)
    assert transaction.read_note("shards/1.state.json") is None


def test_a_save_that_was_given_up_gets_no_more_files(storage: LocalStorage, transaction: LocalTransaction) -> None:
    other = storage.begin(5, 1, SAVE.identity, joins=True)
    transaction.abort()
    with pytest.raises(OSError, match="No such file"):
        other.write("shards/1.bin", [memoryview(DATA)])
    assert list(storage.root.iterdir()) == []


def test_a_save_that_was_given_up_between_two_shards_is_no_success(
    storage: LocalStorage, transaction: LocalTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_note = LocalTransaction.write_note

    def given_up(self: LocalTransaction, name: str, data: bytes) -> None:
        write_note(self, name, data)
        if name == "shards/1.parts.json":
            transaction.abort()

    monkeypatch.setattr(LocalTransaction, "write_note", given_up)
    with pytest.raises(CommitFailed, match="has given up checkpoint-5"):
        write_shards(storage, INFO, SAVE, [shard(), HeldFile("shards/2.bin", memoryview(DATA), lambda: PARTS)])


def test_of_a_save_that_could_not_begin_nothing_is_left(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes would write to it."""
    monkeypatch.setattr(LocalTransaction, "write_note", full)
    with pytest.raises(CommitFailed, match=r"checkpoint-5 at .* could not be begun: No space left"):
        ShardedCommit(storage, INFO, SAVE).begin(storage, INFO)
    assert list(storage.root.iterdir()) == []


def test_what_is_written_after_the_save_was_given_up_is_withdrawn() -> None:
    """In object storage, where nothing is a directory that could be gone."""
    storage = ObjectStorage(MemoryObjects())
    transaction = ShardedCommit(storage, INFO, SAVE).begin(storage, INFO)

    def given_up() -> ShardParts:
        transaction.abort()
        return PARTS

    with pytest.raises(CommitFailed, match="has given up checkpoint-5"):
        write_shards(storage, INFO, SAVE, [shard(given_up)])
    assert storage.store.sizes() == {}
