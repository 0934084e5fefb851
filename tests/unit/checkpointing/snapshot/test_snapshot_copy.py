"""Memory for snapshots, for copies of another node's shards, and what is made of ranks that differ."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from helpers.small_training import SmallTraining
from helpers.thread_ranks import run_ranks

from checkpointing.errors import ReplicasDrifted
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.buddy_copies import BuddyCopies
from checkpointing.snapshot.copy_thread import Copy
from checkpointing.snapshot.snapshot_copy import SnapshotCopy


class Client:
    """Has room for guests, or not."""

    def __init__(self, has_room: bool) -> None:
        self.has_room = has_room
        self.asked: list[tuple[int, int]] = []

    def reserve(self, nbytes: int, guests: int = 0) -> bool:
        self.asked.append((nbytes, guests))
        return self.has_room


@pytest.mark.parametrize("room", [[True, True], [True, False], [False, False]])
def test_copies_are_kept_only_if_all_nodes_have_memory_for_them(
    room: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    def reserve(ranks: Ranks) -> bool:
        client: Any = Client(room[ranks.rank])
        maker = SnapshotCopy(client, ranks, Any, check_replicas=False, pinning=None)  # type: ignore[arg-type]
        maker.buddies = BuddyCopies(client, ranks.with_new_group())
        maker.reserve(9, Copy(lambda copy: None))
        assert client.asked == [(9, 9)]
        return maker.buddies is not None

    with caplog.at_level(logging.WARNING, "checkpointing"):
        assert run_ranks(reserve, per_node=1) == [all(room)] * 2
    assert caplog.text.count("no memory for copies of other nodes' shards") == (not all(room))


def test_without_copies_no_memory_is_asked_for_them() -> None:
    client: Any = Client(False)
    maker = SnapshotCopy(client, Ranks(), Any, check_replicas=False, pinning=None)  # type: ignore[arg-type]
    maker.reserve(9, Copy(lambda copy: None))
    maker.close()
    assert client.asked == [(9, 0)]


BUILDING = threading.Lock()


def in_a_local_phase(ranks: Ranks) -> SmallTraining:
    """A training whose ranks have moved apart, as those of local SGD do between two averages."""
    # One after the other, as they draw from one generator.
    with BUILDING:
        job = SmallTraining(overlap=True, ranks=ranks)
    # The first optimizer step of one would wait for the other's snapshot: threads share torch's hooks.
    ranks.barrier()
    with torch.no_grad():
        next(job.model.parameters()).add_(ranks.rank)
    return job


def test_a_snapshot_that_nobody_asked_for_is_skipped_while_ranks_differ(caplog: pytest.LogCaptureFixture) -> None:
    """A snapshot that was due by time ended local SGD in the middle of a local phase."""

    def train(ranks: Ranks) -> tuple[set[int], list[str]]:
        job = in_a_local_phase(ranks)
        for _ in range(2):
            job.snapshot()
        job.snapshotter.settle()
        # As averaging does.
        next(job.model.parameters()).data.fill_(0.5)
        job.snapshot()
        job.close()
        return set(job.arenas.staged_steps), [event.to_dict()["event"] for event in job.arenas.announced]

    with caplog.at_level(logging.WARNING, "checkpointing"):
        assert run_ranks(train) == [({3}, ["snapshot_skipped"] * 2), ({3}, [])]
    (record,) = caplog.records
    assert "no snapshot in memory" in record.getMessage() and "step 1: the 2 ranks hold" in record.getMessage()
    assert "save_steps=N" in record.getMessage() and "states={'own_model': model" in record.getMessage()


def test_a_commit_is_refused_while_ranks_differ() -> None:
    def train(ranks: Ranks) -> set[int]:
        job = in_a_local_phase(ranks)
        job.snapshot(commit=True)
        try:
            job.snapshotter.settle()
        finally:
            job.snapshotter.close()
        return set(job.arenas.staged_steps)

    for error in run_ranks(train):
        with pytest.raises(ReplicasDrifted, match=r"step 1: the 2 ranks hold .* check_replicas=False"):
            raise error  # type: ignore[misc]
