"""What becomes of one snapshot: staged, refused, or committed without an arena."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_training import Arenas, SmallTraining

from checkpointing.agent.events import Event, SnapshotSkipped
from checkpointing.agent.protocol import Refusal
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import CheckpointError
from checkpointing.format.layout import MODEL_NAME
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot import schedule as snapshotter
from checkpointing.snapshot.request import SnapshotRequest
from checkpointing.snapshot.schedule import SnapshotSchedule


class FullArenas(Arenas):
    """Refuses every snapshot."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__()
        self._refusal = refusal
        self.run_id, self.attempt, self.events = "run", 1, list[dict[str, Any]]()

    def acquire(self, step: int, nbytes: int, *, wait: bool, is_urgent: bool = False) -> Refusal:
        return self._refusal

    def announce(self, event: Event) -> None:
        self.events.append(event.to_dict())

    def prune(self, retention: Retention) -> None:
        pass


@pytest.fixture
def job() -> SmallTraining:
    return SmallTraining(overlap=True)


def request(step: int, *, commit: bool = True, **files: Any) -> SnapshotRequest:
    return SnapshotRequest(step, 0, files, {}, Retention(1), {}, wait=False, commit=commit)


def test_small_files_are_made_in_the_copy_thread(job: SmallTraining) -> None:
    job.snapshotter.take(job.train_state, request(1, own=lambda: b"made", ready=b"ready"), {"static": b"static"})
    job.close()
    files = job.arenas.staged_steps[1]
    assert [files[name] for name in ("own", "ready", "static")] == [b"made", b"ready", b"static"]
    assert job.snapshotter.last_step == 1 == job.snapshotter.committing_step


def test_a_snapshot_in_memory_is_not_committed(job: SmallTraining) -> None:
    job.snapshotter.take(job.train_state, request(1, commit=False), {})
    job.close()
    assert job.snapshotter.last_step == 1 and job.snapshotter.committing_step is None


def test_an_error_in_the_copy_thread_is_raised_before_the_next_optimizer_step(job: SmallTraining) -> None:
    def fail() -> bytes:
        raise CheckpointError("no state")

    job.snapshotter.take(job.train_state, request(1, own=fail), {})
    with pytest.raises(CheckpointError, match="no state"):
        job.optimizer.step()
    job.close()


@pytest.mark.parametrize(
    ("refusal", "commit", "is_written"),
    [(Refusal.BUSY, True, False), (Refusal.NO_MEMORY, True, True), (Refusal.NO_MEMORY, False, False)],
)
def test_a_refused_snapshot_is_committed_directly_where_there_is_no_memory(
    refusal: Refusal, commit: bool, is_written: bool, job: SmallTraining, tmp_path: Path
) -> None:
    tiers, client = open_tiers(str(tmp_path)), FullArenas(refusal)
    agent: Any = client
    own = SnapshotSchedule(agent, tiers, Ranks(), overlap=None, check_replicas=True)
    own.take(job.train_state, request(4, commit=commit), {})
    own.settle()
    # It may be tried again.
    assert own.last_step == -1 and own.committing_step is None and own.direct_error is None
    assert (tiers.catalog.committed_steps() == [4]) is is_written
    own.close()
    job.close()


def test_a_state_that_cannot_be_read_back_is_refused_at_the_first_snapshot(job: SmallTraining) -> None:
    job.optimizer.param_groups[0]["lr"] = torch.nn.Identity()
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\[0\]\['lr'\]"):
        job.snapshot()
    job.snapshotter.close()


def test_what_is_staged_is_what_stock_torch_reads(job: SmallTraining) -> None:
    job.snapshot()
    job.close()
    files = job.arenas.staged_steps[1]
    assert torch.load(io.BytesIO(files["optimizer.pt"]), weights_only=True)["param_groups"][0]["lr"] == 0.1
    assert MODEL_NAME in files and job.torn() == []


@pytest.mark.parametrize("is_much", [True, False])
def test_training_waits_for_much_memory_only_to_commit(
    is_much: bool, job: SmallTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "_MUCH_BYTES", 0 if is_much else 1 << 30)
    own, arenas = job.snapshotter, job.arenas
    own.prepare(job.train_state, Ranks())
    if not is_much:
        threading.Timer(0.05, arenas.may_reserve.set).start()
    own.take(job.train_state, request(1, commit=False), {})
    skipped = [event.step for event in arenas.announced if isinstance(event, SnapshotSkipped)]
    assert (skipped, own.last_step) == (([1], -1) if is_much else ([], 1))
    threading.Timer(0.05, arenas.may_reserve.set).start()
    own.take(job.train_state, request(2, commit=True), {})
    job.close()
    assert arenas.may_reserve.is_set() and 2 in arenas.staged_steps


def test_memory_that_is_released_under_a_snapshot_makes_none(job: SmallTraining) -> None:
    parameter = next(job.model.parameters())

    def release() -> bytes:
        parameter.untyped_storage().resize_(0)
        return b""

    # Small files are made in the copy thread, before the copy.
    job.snapshotter.take(job.train_state, request(1, own=release), {})
    job.close()
    assert not job.arenas.staged_steps and "was released" in job.arenas.abandoned[0]
