"""Memory for snapshots, and for copies of another node's shards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from helpers.thread_ranks import run_ranks

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
