"""Copies of shards in the memory of another node."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.thread_ranks import run_ranks

from checkpointing.agent.protocol import Guest
from checkpointing.errors import AgentUnavailable
from checkpointing.format.digest import PART_BYTES
from checkpointing.format.shard_index import ShardParts, shard_name
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.buddy_copies import BuddyCopies, has_buddies


class Client:
    """Takes in what was received; or is gone."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.is_gone = is_gone
        self.received_files: list[tuple[int, int, Any]] = []

    def received(self, step: int, arena: int, guest: Any) -> None:
        if self.is_gone:
            raise AgentUnavailable("the agent is gone")
        self.received_files.append((step, arena, guest))


def contents(rank: int) -> bytearray:
    """A rank's shard: of another size on each, one of several parts, one empty."""
    nbytes = [3000, PART_BYTES + 5, 0, 4097][rank]
    return bytearray([rank + 1]) * nbytes


SIZES = [len(contents(rank)) for rank in range(4)]


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (4, 1), (2, 1)])
def test_each_rank_keeps_the_shard_of_one_on_the_node_before(size: int, per_node: int) -> None:
    def exchange(ranks: Ranks) -> tuple[int, Any]:
        client: Any = Client()
        buddies = BuddyCopies(client, ranks)
        assert len(buddies.guests) == per_node and buddies.guests[ranks.local_rank] == buddies.guest
        place = 4096 * ranks.local_rank
        guest = memoryview(bytearray(SIZES[buddies.guest]))
        for step in (7, 8):
            buddies.exchange(step, step % 2, memoryview(contents(ranks.rank)), guest, place)
        buddies.close()
        assert guest == contents(buddies.guest)
        digest = ShardParts.of(memoryview(contents(buddies.guest))).digest
        file = Guest(shard_name(buddies.guest), place, SIZES[buddies.guest], digest)
        return buddies.guest, client.received_files == [(7, 1, file), (8, 0, file)]

    expected = [((rank - per_node) % size, True) for rank in range(size)]
    assert run_ranks(exchange, size, per_node) == expected


def test_what_was_altered_on_its_way_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ShardParts.of

    def exchange(ranks: Ranks) -> Any:
        client: Any = Client()
        own, guest = memoryview(bytearray([ranks.rank] * 9)), memoryview(bytearray(9))
        buddies = BuddyCopies(client, ranks)
        buddies.exchange(7, 0, own, guest, 0)
        buddies.close()
        return client.received_files[0][2] is not None

    def of(data: memoryview) -> ShardParts:
        return real(memoryview(b"other") if bytes(data[:1]) == b"\1" else data)

    monkeypatch.setattr(ShardParts, "of", staticmethod(of))
    assert run_ranks(exchange, per_node=1) == [True, True]
    num_calls = iter(range(100))
    monkeypatch.setattr(ShardParts, "of", staticmethod(lambda data: real(memoryview(b"%d" % next(num_calls)))))
    assert run_ranks(exchange, per_node=1) == [False, False]


def test_a_rank_or_an_agent_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(ranks: Ranks) -> Any:
        client: Any = Client(is_gone=not ranks.is_first)
        buddies = BuddyCopies(client, ranks)
        buddies.exchange(7, 0, memoryview(bytearray(9)), memoryview(bytearray(9)), 0)
        buddies.close()
        return client.received_files

    def transfer(self: Ranks, *parts: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    assert run_ranks(exchange, per_node=1)[1] == []
    monkeypatch.setattr("helpers.thread_ranks.ThreadRanks.transfer", transfer)
    assert run_ranks(exchange, per_node=1) == [[(7, 0, None)], []]


@pytest.mark.parametrize(("size", "per_node", "expected"), [(4, 2, True), (3, 1, True), (2, 2, False), (3, 2, False)])
def test_nodes_with_equally_many_ranks_have_buddies(size: int, per_node: int, expected: bool) -> None:
    def ask(ranks: Ranks) -> bool:
        # The last node of three ranks, two per node, has one.
        local = min(per_node, size - ranks.rank + ranks.local_rank)
        return has_buddies(type(ranks)(**{**vars(ranks), "local_world_size": local}))

    assert run_ranks(ask, size, per_node) == [expected] * size
