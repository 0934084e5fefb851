"""What the code does, call for call, is a way through the model: a change of the one asks for a change of the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.commit_model import CommitModel
from chaos.conformance import DiskRecorder, Recorder, RecordingStore, departure, unfinished
from chaos.disk_model import DiskModel
from chaos.object_model import ObjectModel

from checkpointing.agent.fencing import Fencer
from checkpointing.agent.publisher import Publisher
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.reading import read_private
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError, Fenced
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.host.failpoints import NAMES
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.object_storage import ObjectStorage

# Before which calls one life is interrupted by the other; all of them with the model's wider bounds.
EVERY = 1 if os.environ.get("COMMIT_MODEL") == "large" else 3


class RealLife:
    """One writer: the real code, called as the agent and rank 0 call it."""

    def __init__(self, storage: Storage, attempt: int, recorder: Recorder) -> None:
        self.storage, self.attempt, self._recorder = storage, attempt, recorder
        tiers, keep = Tiers(storage), Retention(keep_last=1)
        self.fencer = Fencer(tiers, lambda result, arena: None, commits=True)
        self._publisher = Publisher(tiers, self.fencer, lambda result, arena: None, local_retention=keep)
        self._publisher.retention = keep

    def begin(self) -> None:
        """And sweep."""
        self._recorder.life = self.attempt
        self.fencer._fence(self.fencer.begin(self.attempt, ()))

    def choose(self) -> int:
        """As `checkpointing.resume.agreement` does it, which imports torch."""
        self._recorder.life = self.attempt
        for entry in Catalog(self.storage).scan():
            if entry.manifest is not None:
                read_private(self.storage.file(entry.manifest, "model"))
                return entry.step
            self.storage.quarantine(entry.step)
        return 0

    def save(self, step: int) -> bool:
        """And prune."""
        self._recorder.life = self.attempt
        data = b"%d of %d" % (step, self.attempt)
        self._recorder.add("capture")

        def digest() -> str:
            # As the agent does: what was written is what was captured.
            self._recorder.add("compare")
            return digest_buffer(data)

        file = StagedFile("model", [memoryview(data)], digest)
        commit_snapshot(self.storage, SnapshotInfo("run", self.attempt, step, 1, step), [file])
        self._publisher.prune(self.storage)
        return True


def prepared(storage: Storage, recorder: Recorder) -> RealLife:
    """Where the model begins: attempt 1 has begun, and has committed step 1."""
    first = RealLife(storage, 1, recorder)
    storage.begin_attempt(1)
    first.fencer._swept = True
    first.save(1)
    recorder.events.clear()
    return first


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DiskRecorder, RealLife, RealLife]:
    root = tmp_path / "store"
    recorder = DiskRecorder(root, monkeypatch)
    return recorder, prepared(LocalStorage(root), recorder), RealLife(LocalStorage(root), 2, recorder)


def in_store(
    honours: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Recorder, RecordingStore, tuple[RealLife, RealLife]]:
    recorder = Recorder()
    recorder.watch_failpoints(monkeypatch)
    location = f"memory://{uuid.uuid4().hex}/run"
    stores = [RecordingStore(location, recorder, honours=honours) for _ in range(2)]
    first = prepared(ObjectStorage(stores[0]), recorder)
    return recorder, stores[0], (first, RealLife(ObjectStorage(stores[1]), 2, recorder))


def assert_is_a_way(model: CommitModel, recorder: Recorder, *ended: int) -> None:
    assert departure(model, recorder.events) is None
    for life in ended:
        assert not unfinished(model, recorder.events, life), f"the model has {life} do more than the code does"


def test_one_life_after_the_other_on_a_disk(on_disk: tuple[DiskRecorder, RealLife, RealLife]) -> None:
    recorder, first, second = on_disk
    first.save(2)
    first.save(3)
    second.begin()
    assert second.choose() == 3
    second.save(4)
    assert_is_a_way(DiskModel(saves=(2, 1), any_order=True), recorder, 1, 2)
    passed = {event.path for event in recorder.events if event.kind == "at"}
    assert passed == {name for name in NAMES if name.startswith(("fence.", "local."))}


@pytest.mark.parametrize("honours", [True, False])
def test_one_life_after_the_other_in_object_storage(honours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _, (first, second) = in_store(honours, monkeypatch)
    first.save(2)
    first.save(3)
    second.begin()
    assert second.choose() == 3
    second.save(4)
    assert_is_a_way(ObjectModel(honours=honours, saves=(2, 1)), recorder, 1, 2)
    passed = {event.path for event in recorder.events if event.kind == "at"}
    assert passed | {"aside.copied", "fence.written"} == {
        name for name in NAMES if name.startswith(("fence.", "remote.", "aside."))
    }


@pytest.mark.parametrize("life", [1, 2])
@pytest.mark.parametrize("number", range(40))
def test_two_lives_that_meet_on_a_disk(
    number: int, life: int, on_disk: tuple[DiskRecorder, RealLife, RealLife]
) -> None:
    """One of them is interrupted by the whole of the other's, before its first call, its second, and so on."""
    recorder, first, second = on_disk
    interrupted(recorder, number, *two_lives(first, second, outer=life))
    assert_is_a_way(DiskModel(saves=(1, 1), any_order=True), recorder)


@pytest.mark.parametrize("honours", [True, False])
@pytest.mark.parametrize("life", [1, 2])
@pytest.mark.parametrize("number", range(34))
def test_two_lives_that_meet_in_object_storage(
    number: int, life: int, honours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, _, (first, second) = in_store(honours, monkeypatch)
    interrupted(recorder, number, *two_lives(first, second, outer=life))
    assert_is_a_way(ObjectModel(honours=honours, saves=(1, 1)), recorder)


@pytest.mark.parametrize("honours", [True, False])
@pytest.mark.parametrize("carried_out", [True, False])
def test_an_answer_that_is_lost(carried_out: bool, honours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, store, (first, _) = in_store(honours, monkeypatch)
    store.loses = carried_out
    with contextlib.suppress(CheckpointError):
        first.save(2)
    assert_is_a_way(ObjectModel(honours=honours, saves=(1, 0), answers_to_lose=1), recorder, 1)
    assert (first.storage.steps() == [2]) == carried_out


def two_lives(first: RealLife, second: RealLife, *, outer: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What the older and the newer one do; the one that is interrupted comes first."""

    def older() -> None:
        with contextlib.suppress(CheckpointError):
            first.save(2)

    def newer() -> None:
        with contextlib.suppress(CheckpointError, OSError):
            second.begin()
            second.save(second.choose() + 1)

    return (older, newer) if outer == 1 else (newer, older)


def interrupted(recorder: Recorder, number: int, outer: Callable[[], None], inner: Callable[[], None]) -> None:
    """Do one, and the other right before its call of that number."""
    calls = itertools.count()
    add = recorder.add

    def counted(kind: str, path: str = "", target: str = "") -> None:
        if next(calls) == number:
            life = recorder.life
            inner()
            recorder.life = life
        add(kind, path, target)

    recorder.add = counted  # type: ignore[method-assign]
    outer()
    # One that has ended before that number was not interrupted: that is the case without an interruption.


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events[:5] + events[6:],
        lambda events: [*events[:5], events[6], events[5], *events[7:]],
        lambda events: [*events[:9], events[8], *events[9:]],
    ],
)
def test_another_order_is_no_way(spoil: object, on_disk: tuple[DiskRecorder, RealLife, RealLife]) -> None:
    recorder, first, _ = on_disk
    first.save(2)
    assert departure(DiskModel(saves=(1, 0)), spoil(recorder.events)) is not None  # type: ignore[operator]


def test_the_late_writer_is_told(on_disk: tuple[DiskRecorder, RealLife, RealLife]) -> None:
    _, first, second = on_disk
    second.begin()
    with pytest.raises(Fenced):
        first.save(2)
