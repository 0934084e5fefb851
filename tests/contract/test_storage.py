"""What every storage must keep. New back ends join by a parameter of the `location` fixture."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.support import assert_is_what_was_written, commit_split, commit_together, leftovers

from checkpointing.commit.catalog import Catalog, verify
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.reading import read_private
from checkpointing.errors import CheckpointError, CommitConflict, Fenced, InvalidCheckpoint
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import FileEntry, Manifest, SnapshotInfo
from checkpointing.storage import Storage, open_storage, rates
from checkpointing.storage.local import LocalStorage
from checkpointing.storage.object_storage import ObjectStorage


def commit(storage: Storage, step: int, attempt: int = 1, data: bytes = b"abc") -> Manifest:
    info = SnapshotInfo("run", attempt, step, 2, step * 8)
    files = [staged("a", data), staged("b", b"")]
    return commit_snapshot(storage, info, files)


def staged(name: str, data: bytes) -> StagedFile:
    return StagedFile(name, [memoryview(data)], lambda: digest_buffer(data))


def read(storage: Storage, step: int, name: str = "a") -> bytes:
    data, _ = read_private(storage.file(storage.read_manifest(step), name))
    return bytes(data)


def tamper(storage: Storage, step: int, name: str, data: bytes | None) -> None:
    """Behind the storage's back: overwrite a file of a checkpoint, or delete it."""
    if isinstance(storage, LocalStorage):
        path = storage.directory(step) / name
        path.unlink() if data is None else path.write_bytes(data)
        return
    assert isinstance(storage, ObjectStorage)
    key = f"checkpoint-{step}/{name}"
    if name != "manifest.json":
        key = f"{storage.read_manifest(step).folder}/{name}"
    if data is None:
        storage.store.delete([key])
    else:
        storage.store.put(key, data)


def raw_manifest(storage: Storage, step: int) -> bytes:
    if isinstance(storage, LocalStorage):
        return (storage.directory(step) / "manifest.json").read_bytes()
    assert isinstance(storage, ObjectStorage)
    return storage.store.get(f"checkpoint-{step}/manifest.json") or b""


def test_an_empty_place_has_no_checkpoints(storage: Storage) -> None:
    assert storage.steps() == [] and Catalog(storage).entries() == [] and storage.sweep() == []
    assert storage.fence().attempt == 0 and storage.quarantined() == []


def test_a_place_answers_for_itself(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks which kind of storage it is."""
    monkeypatch.setattr(rates, "_PIECE_BYTES", 1 << 16)
    storage.probe()
    measured = storage.measure(1 << 16)
    assert measured is not None and measured.write > 0
    # What is in a directory can be read from a cache, and has a limit.
    assert (measured.read is None) == (storage.free_bytes() is not None) == (storage.root is not None)
    assert storage.decides_between_writers in (True, False)
    assert (storage.probe() is None) == storage.decides_between_writers


def test_a_trial_leaves_nothing_and_removes_what_a_killed_one_left(storage: Storage, location: str) -> None:
    storage.begin_attempt(1)
    commit(storage, 5)

    def names() -> set[str]:
        if storage.root is not None:
            return {path.name for path in storage.root.iterdir()}
        assert storage.store is not None
        return set(storage.store.sizes())

    before, prefix = names(), "probe/" if storage.root is None else ".probe."
    old, new = f"{prefix}1700000000-{'a' * 32}", f"{prefix}{time.time():.0f}-{'b' * 32}"
    for name in (old, new):
        if storage.root is not None:
            (storage.root / name).write_bytes(b"left")
        else:
            assert storage.store is not None
            storage.store.put(name, b"left")
    # No reader takes them for a checkpoint, or for anything else.
    assert storage.steps() == [5] and storage.sweep() == [] and storage.quarantined() == []
    storage.probe()
    assert names() == before | {new}, "another trial may be under way"


def test_a_trial_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: Path) -> None:
        assert [one.name.startswith(".probe.") for one in path.iterdir()] == [True]
        raise SystemExit

    monkeypatch.setattr("checkpointing.storage.local.fsync_directory", stop)
    with pytest.raises(SystemExit):
        LocalStorage(tmp_path).probe()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_loses_what_is_renamed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(path: Path) -> None:
        next(path.iterdir()).unlink()

    monkeypatch.setattr("checkpointing.storage.local.fsync_directory", lose)
    with pytest.raises(OSError, match="cannot be read back"):
        LocalStorage(tmp_path).probe()


def test_all_that_is_there_can_be_removed(storage: Storage, location: str) -> None:
    storage.begin_attempt(1)
    commit(storage, 5)
    storage.sidecars.write_restart_state(b"{}")
    storage.sidecars.write("a.json", b"{}")
    storage.remove_all()
    other = open_storage(location)
    assert (other.steps(), other.sidecars.sizes(), other.sidecars.read_restart_state(), other.fence().attempt) == (
        [],
        {},
        None,
        0,
    )


def test_commit_then_read(storage: Storage, location: str) -> None:
    commit(storage, 5)
    commit(storage, 100)
    commit(storage, 20)
    # Another process sees the same.
    other = open_storage(location)
    assert [entry.step for entry in Catalog(other).entries()] == [100, 20, 5]
    manifest = Catalog(other).verify(20)
    assert (manifest.samples_consumed, manifest.world_size) == (160, 2)
    assert (read(other, 20), read(other, 20, "b")) == (b"abc", b"")


@pytest.mark.parametrize("nbytes", [1, 16 << 20, (40 << 20) + 12345])
def test_files_of_any_size(storage: Storage, nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    pieces = [memoryview(data)[:nbytes]]
    file = StagedFile("big", pieces, lambda: digest_buffer(pieces[0]))
    commit_snapshot(storage, SnapshotInfo("run", 1, 3, 1, 3), [file])
    assert Catalog(storage).verify(3).files[0].size == nbytes
    assert read(storage, 3, "big") == bytes(pieces[0])


@pytest.mark.parametrize("window_mb", [10, 16, 40])
def test_pieces_that_use_the_same_memory_again(storage: Storage, window_mb: int) -> None:
    """As without memory for a snapshot: each piece is overwritten by the next."""
    window = bytearray(window_mb << 20)

    def pieces() -> Iterator[memoryview]:
        for value in range(4):
            window[:] = bytes([value]) * len(window)
            yield memoryview(window)

    expected = b"".join(bytes([value]) * len(window) for value in range(4))
    file = StagedFile("windowed", pieces(), lambda: digest_buffer(expected))
    commit_snapshot(storage, SnapshotInfo("run", 1, 3, 1, 3), [file])
    assert Catalog(storage).verify(3).total_bytes == len(expected)


def test_two_nodes_write_one_file(storage: Storage, location: str) -> None:
    # fsspec has no way to write one object from several machines.
    assert storage.can_split != location.startswith("memory:")
    if storage.can_split:
        assert_is_what_was_written(storage, commit_split(location, 5))
        assert leftovers(location.removeprefix("file://")) == []


def test_nothing_is_visible_before_commit_or_after_abort(storage: Storage) -> None:
    transaction = storage.begin(7, 1)
    transaction.write("a", [memoryview(b"x")])
    assert storage.steps() == []
    transaction.abort()
    transaction.abort()
    assert storage.steps() == [] and storage.sweep() == []


def test_nodes_that_write_together_share_one_checkpoint(storage: Storage, location: str) -> None:
    """Each with a storage of its own; what one has written is there for the other, and one commits."""
    manifest = commit_together(location, 7)
    assert_is_what_was_written(storage, manifest)
    assert storage.sweep() == [] and storage.read_manifest(7).is_sharded


def test_a_note_is_replaced_whole_and_seen_by_the_other_nodes(storage: Storage, location: str) -> None:
    mine, theirs = storage.begin(7, 1, "ab"), open_storage(location).begin(7, 1, "ab")
    assert theirs.read_note("shards/1.parts.json") is None
    for text in (b"first", b"", b"the second is longer"):
        mine.write_note("shards/1.parts.json", text)
        assert theirs.read_note("shards/1.parts.json") == text
    # Another save of the same step and attempt has its own.
    assert storage.begin(7, 1, "cd").read_note("shards/1.parts.json") is None


def test_who_gives_a_save_up_removes_what_all_nodes_wrote(storage: Storage, location: str) -> None:
    storage.begin_attempt(1)
    mine, theirs = storage.begin(7, 1, "ab"), open_storage(location).begin(7, 1, "ab")
    theirs.write("shards/1.bin", [memoryview(b"x")])
    theirs.write_note("shards/1.parts.json", b"{}")
    mine.abort()
    mine.abort()
    assert theirs.read_note("shards/1.parts.json") is None
    assert storage.sweep() == [] and storage.steps() == []


def test_what_a_dead_writer_left_is_swept(storage: Storage) -> None:
    commit(storage, 5)
    storage.begin(7, 1).write("a", [memoryview(b"x")])
    storage.begin(5, 2).write("a", [memoryview(b"x")])
    assert len(storage.sweep()) == 2
    assert storage.steps() == [5] and storage.sweep() == []
    assert read(storage, 5) == b"abc"


def test_a_sweep_spares_what_a_newer_attempt_writes(storage: Storage, location: str) -> None:
    """Its own attempt was given up as it began, but lives: it wakes up in the sweep."""
    late = open_storage(location)
    late.begin_attempt(1)
    late.begin(6, 1).write("a", [memoryview(b"x")])
    storage.begin_attempt(2)
    newer = storage.begin(7, 2)
    newer.write("a", [memoryview(b"x")])
    assert len(late.sweep()) == 1
    newer.commit(Manifest("run", 2, 7, 1, 7, 0.0, (FileEntry("a", 1, digest_buffer(b"x")),)))
    assert Catalog(storage).verify(7).attempt == 2


def test_a_committed_step_is_not_overwritten(storage: Storage) -> None:
    commit(storage, 5, data=b"first")
    with pytest.raises(CommitConflict):
        commit(storage, 5, attempt=2, data=b"second")
    assert read(storage, 5) == b"first"
    assert storage.sweep() == []


def test_of_two_writers_one_wins(storage: Storage, location: str) -> None:
    outcomes: list[str] = []

    def write(number: int) -> None:
        try:
            commit(open_storage(location), 5, attempt=number + 1, data=b"%d" % number)
            outcomes.append(str(number))
        except CheckpointError:
            outcomes.append("lost")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome != "lost"]
    assert len(outcomes) == 4
    if isinstance(storage, LocalStorage) or (isinstance(storage, ObjectStorage) and storage.store.honours_if_absent):
        assert len(winners) == 1 and read(storage, 5) == winners[0].encode()
    # Whichever writer won, its checkpoint is whole.
    Catalog(storage).verify(5)


def test_every_kind_of_damage_is_found(storage: Storage) -> None:
    for step in range(5):
        commit(storage, step)
    tamper(storage, 0, "a", b"ab")
    tamper(storage, 1, "a", b"abd")
    tamper(storage, 2, "a", None)
    tamper(storage, 3, "manifest.json", None)
    tamper(storage, 4, "manifest.json", raw_manifest(storage, 1))
    for step, reason in enumerate(["2 bytes", "digest", "cannot be read", "never committed", "of step 1"]):
        with pytest.raises(InvalidCheckpoint, match=reason):
            verify(storage, step)
    assert Catalog(storage).committed_steps() == [1]  # only a full read sees a changed byte


def test_what_is_committed_during_a_survey_is_not_taken_for_damaged(storage: Storage, location: str) -> None:
    commit(storage, 1)
    sizes = storage._sizes

    def and_then_another_commits(step: int | None = None) -> dict[str, int]:
        found = sizes(step)
        storage._sizes = sizes  # type: ignore[method-assign]
        commit(open_storage(location), 2)
        return found

    storage._sizes = and_then_another_commits  # type: ignore[method-assign]
    assert [entry.problem for entry in Catalog(storage).entries()] == [None]
    assert Catalog(storage).committed_steps() == [1, 2]


def test_quarantine_keeps_and_counts(storage: Storage) -> None:
    for data in (b"one", b"two"):
        commit(storage, 5, data=data)
        kept = storage.quarantine(5)
        if isinstance(storage, LocalStorage):
            assert (Path(kept) / "a").read_bytes() == data
    assert storage.steps() == [] and len(storage.quarantined()) == 2
    assert storage.sweep() == []


def test_what_was_quarantined_gets_its_place_back_while_that_is_free(storage: Storage) -> None:
    commit(storage, 5, data=b"one")
    storage.quarantine(5)
    (name,) = storage.quarantined()
    commit(storage, 5, data=b"two")
    assert storage.take_back(name) is None and read(storage, 5) == b"two"
    storage.remove(5)
    assert storage.take_back(name) == 5 and read(storage, 5) == b"one"
    assert storage.quarantined() == [] and storage.sweep() == []


def test_remove(storage: Storage) -> None:
    commit(storage, 5)
    commit(storage, 6)
    storage.remove(5)
    assert storage.steps() == [6] and storage.sweep() == []
    commit(storage, 5, data=b"again")
    assert read(storage, 5) == b"again" and read(storage, 6) == b"abc"


def test_an_older_attempt_cannot_publish_after_a_newer_one_has_begun(storage: Storage, location: str) -> None:
    storage.begin_attempt(1)
    commit(storage, 10, attempt=1)
    zombie = open_storage(location).begin(30, 1)
    zombie.write("a", [memoryview(b"abc")])
    storage.begin_attempt(2)
    with pytest.raises(Fenced, match="attempt 2 of this run has begun"):
        commit(open_storage(location), 20, attempt=1)
    with pytest.raises(Fenced, match="attempt 2 of this run has begun"):
        zombie.commit(Manifest("run", 1, 30, 1, 0, 0.0, ()))
    zombie.abort()
    with pytest.raises(Fenced, match="attempt 2 of this run has begun"):
        open_storage(location).begin_attempt(1)
    commit(storage, 20, attempt=2)
    assert Catalog(storage).committed_steps() == [10, 20]


def test_what_was_published_in_spite_of_the_fence_does_not_count(storage: Storage, location: str) -> None:
    """The race that no check can close: an older attempt looks, a newer one begins, the older one publishes."""
    storage.begin_attempt(1)
    commit(storage, 10, attempt=1)
    late = open_storage(location)
    newer_fence = threading.Event()
    fence = late.fence

    def looked_too_early() -> object:
        found = fence()
        if not newer_fence.is_set():
            newer_fence.set()
            storage.begin_attempt(2)
        return found

    late.fence = looked_too_early  # type: ignore[method-assign,assignment]
    with pytest.raises(Fenced, match="attempt 2"):
        commit(late, 20, attempt=1, data=b"late")
    assert Catalog(storage).committed_steps() == [10]
    commit(storage, 20, attempt=2, data=b"newer")
    assert read(storage, 20) == b"newer" and Catalog(storage).committed_steps() == [10, 20]


def test_a_fenced_writer_quarantines_nothing(storage: Storage, location: str) -> None:
    """Both find the step damaged; the newer one quarantines it and commits the step before the older one acts."""
    storage.begin_attempt(1)
    commit(storage, 5, attempt=1)
    tamper(storage, 5, "a", None)
    late = open_storage(location)
    late.begin_attempt(2)
    read_manifest = late.read_manifest

    def seen_too_early(step: int) -> Manifest:
        try:
            return read_manifest(step)
        finally:
            storage.begin_attempt(3)
            commit(storage, 5, attempt=3, data=b"newer")

    late.read_manifest = seen_too_early  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        commit(late, 5, attempt=2, data=b"late")
    assert read(storage, 5) == b"newer" and len(storage.quarantined()) == 1


def test_what_is_acknowledged_while_a_newer_attempt_begins_counts(storage: Storage, location: str) -> None:
    """The newer one has seen what there is; the older one publishes, finds no newer fence, and tells of its success."""
    storage.begin_attempt(1)
    newer = open_storage(location)
    acknowledged: list[int] = []
    counting = newer.counting

    def counted_too_early() -> object:
        found = counting()
        with contextlib.suppress(Fenced):
            commit(storage, 10, attempt=1)
            acknowledged.append(10)
        return found

    newer.counting = counted_too_early  # type: ignore[method-assign,assignment]
    newer.begin_attempt(2)
    assert Catalog(storage).committed_steps() == acknowledged


def test_what_a_newer_attempt_counts_as_it_begins_is_whole_whatever_its_writer_is_told(
    storage: Storage, location: str
) -> None:
    storage.begin_attempt(1)
    late, newer = open_storage(location), open_storage(location)
    look, counting = late.fence, newer.counting
    looks: list[object] = []

    def begun_before_the_second_look() -> object:
        looks.append("late")
        if len(looks) != 2:
            return look()
        newer.begin_attempt(2)
        return looks[-1]

    def counted() -> object:
        looks.append(look())
        return counting()

    late.fence = begun_before_the_second_look  # type: ignore[method-assign,assignment]
    newer.counting = counted  # type: ignore[method-assign,assignment]
    with pytest.raises(Fenced):
        commit(late, 10, attempt=1)
    assert Catalog(storage).verify(10).attempt == 1 and storage.sweep() == []


def test_an_attempt_that_died_as_it_began_hides_nothing(storage: Storage, location: str) -> None:
    storage.begin_attempt(1)
    commit(storage, 10, attempt=1)
    dead = open_storage(location)

    def dies() -> object:
        raise KeyboardInterrupt

    dead.counting = dies  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        dead.begin_attempt(2)
    assert Catalog(storage).committed_steps() == [10]
    with pytest.raises(Fenced):
        commit(storage, 20, attempt=1)
    open_storage(location).begin_attempt(3)
    assert Catalog(storage).committed_steps() == [10]


def test_what_the_newer_attempt_took_over_may_be_published(storage: Storage) -> None:
    """The agent still holds the snapshot that the newer attempt resumes from."""
    storage.begin_attempt(1)
    storage.begin_attempt(2, held=[(7, 1)])
    commit(storage, 7, attempt=1)
    assert Catalog(storage).committed_steps() == [7]
    storage.begin_attempt(3)
    assert Catalog(storage).committed_steps() == [7]


def test_two_runners_cannot_begin_the_same_attempt(storage: Storage, location: str) -> None:
    storage.begin_attempt(1)
    with pytest.raises(Fenced, match="attempt 1"):
        open_storage(location).begin_attempt(1)


def test_damage_is_reported_as_such_after_a_new_attempt_has_begun_and_can_be_repaired(storage: Storage) -> None:
    storage.begin_attempt(1)
    commit(storage, 10, attempt=1)
    tamper(storage, 10, "a", b"ab")
    storage.begin_attempt(2)
    storage.begin_attempt(3)
    with pytest.raises(InvalidCheckpoint, match="2 bytes"):
        storage.read_manifest(10)
    if isinstance(storage, LocalStorage):
        (storage.directory(10) / "a").write_bytes(b"abc")
        assert read(storage, 10) == b"abc"


def test_a_supervisors_note_is_replaced_whole_and_not_by_an_older_one(storage: Storage, location: str) -> None:
    assert storage.sidecars.read_restart_state() is None
    storage.probe()
    storage.sidecars.replace_restart_state(b'{"attempt": 2, "x": 1}')
    storage.sidecars.replace_restart_state(b'{"attempt": 2, "x": 2}')
    storage.sidecars.replace_restart_state(b'{"attempt": 1, "x": 3}')
    assert open_storage(location).sidecars.read_restart_state() == b'{"attempt": 2, "x": 2}'
    # The restart state is not a checkpoint, and a sweep does not remove it.
    commit(storage, 5)
    assert storage.sweep() == [] and storage.steps() == [5]
    storage.sidecars.write_restart_state(b"damaged")
    storage.sidecars.replace_restart_state(b'{"attempt": 1}')
    assert storage.sidecars.read_restart_state() == b'{"attempt": 1}'


def test_records_are_kept_beside_the_checkpoints(storage: Storage) -> None:
    assert storage.sidecars.sizes() == {} and storage.sidecars.read("journal-a-1.000000.jsonl") == b""
    storage.begin_attempt(1)
    storage.sidecars.write("journal-a-1.000000.jsonl", b"one")
    storage.sidecars.write("journal-a-1.000000.jsonl", b"one more")
    storage.sidecars.write("journal-a-1.000001.jsonl", b"")
    storage.sidecars.write("journal-b-2.000000.jsonl", b"two")
    assert list(storage.sidecars.sizes("journal-a-").items()) == [
        ("journal-a-1.000000.jsonl", 8),
        ("journal-a-1.000001.jsonl", 0),
    ]
    assert storage.sidecars.read("journal-a-1.000000.jsonl") == b"one more"
    assert len(storage.sidecars.sizes()) == 3
    commit(storage, 5)
    storage.begin_attempt(2)
    storage.sweep()
    assert len(storage.sidecars.sizes()) == 3 and Catalog(storage).committed_steps() == [5]
