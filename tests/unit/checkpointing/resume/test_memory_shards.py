"""Which snapshots in shards all ranks can resume from in memory, and from whom."""

from __future__ import annotations

import pytest
from helpers.spread_checkpoint import NAME, ROWS, spread

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.shard_reading import CommonPieces, in_memory
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import INDEX_NAME, ShardParts, shard_name
from checkpointing.resume.memory_shards import NodeShare, newest_attempt, resumable, shares_by_step


def share(*ranks: int, attempt: int = 1, identity: str = "ab", world_size: int = 4) -> NodeShare:
    return NodeShare(attempt, identity, world_size, frozenset(ranks))


def test_a_share_is_described_by_its_shards() -> None:
    files = {name: memoryview(b"x") for name in (shard_name(2), shard_name(3), INDEX_NAME)}
    info = SnapshotInfo("run", 3, 7, 4, 7)
    spread_out = OfferedSnapshot(info, files, {}, save="ab")
    whole = OfferedSnapshot(info, {}, {})
    assert shares_by_step([whole, spread_out]) == {7: share(2, 3, attempt=3)}
    assert shares_by_step([whole]) == {}


FIRST, SECOND, ALL = share(0, 1), share(2, 3), share(0, 1, 2, 3)
NODES = [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("offers", "nodes", "found"),
    [
        # Each rank verifies its own, and those of a node that is not there any more are shared out.
        ([{7: FIRST}, {7: FIRST}, {7: SECOND}, {7: SECOND}], NODES, {7: {0: 0, 1: 1, 2: 2, 3: 3}}),
        ([{7: ALL}, {7: ALL}, {7: ALL}, {7: ALL}], NODES, {7: {0: 0, 1: 1, 2: 2, 3: 3}}),
        # A node was lost, and replaced or not; without and with a copy of its shards.
        ([{7: FIRST}, {7: FIRST}, {}, {}], NODES, {}),
        ([{7: ALL}, {7: ALL}, {}, {}], NODES, {7: {0: 0, 1: 1, 2: 0, 3: 1}}),
        ([{7: ALL}, {7: ALL}], [0, 0], {7: {0: 0, 1: 1, 2: 0, 3: 1}}),
        ([{7: ALL}], [0], {7: {0: 0, 1: 0, 2: 0, 3: 0}}),
        # The ranks have changed places.
        ([{7: SECOND}, {7: SECOND}, {7: FIRST}, {7: FIRST}], NODES, {7: {2: 0, 3: 1, 0: 2, 1: 3}}),
        # There are more.
        ([{7: ALL}] * 4 + [{}] * 2, [*NODES, 4, 4], {7: {0: 0, 1: 1, 2: 2, 3: 3}}),
        # Another save of the same step.
        ([{7: FIRST}, {7: FIRST}, *[{7: share(2, 3, identity="cd")}] * 2], NODES, {}),
        ([{7: share(0, 1, identity="cd")}] * 2 + [{7: ALL}] * 2, NODES, {7: {0: 2, 1: 3, 2: 2, 3: 3}}),
        # An older step of which all is there, in place of a newer one.
        ([*[{7: FIRST, 8: share(0, 1)}] * 2, *[{7: SECOND}] * 2], NODES, {7: {0: 0, 1: 1, 2: 2, 3: 3}}),
        # What an earlier attempt has left, once a newer one has made snapshots.
        ([*[{9: FIRST, 5: share(0, 1, attempt=2)}] * 2, *[{9: SECOND}] * 2], NODES, {}),
        ([{}, {}, {}, {}], NODES, {}),
    ],
)
def test_every_shard_must_be_on_some_node(
    offers: list[dict[int, NodeShare]], nodes: list[int], found: dict[int, dict[int, int]]
) -> None:
    assert {step: held.servers for step, held in resumable(offers, nodes).items()} == found


def test_what_a_newer_attempt_has_left_otherwise_counts_too() -> None:
    offers = [{7: FIRST}, {7: FIRST}, {7: SECOND}, {7: SECOND}]
    assert newest_attempt(offers) == 1 and newest_attempt([{}, {}]) == 0
    assert resumable(offers, NODES, 1)[7].nodes == (0, 2) and resumable(offers, NODES, 2) == {}


def test_what_all_need_of_the_first_shard_is_sent() -> None:
    index, shards = spread(ROWS)
    data = memoryview(shards[0])
    shard = in_memory(shard_name(0), data, ShardParts.of(data))
    pieces = CommonPieces.read_from(shard, index)
    assert sum(map(len, pieces.values())) == sum(piece.nbytes for piece in index.files[NAME].common)
    altered = memoryview(bytearray(data))
    altered[0] ^= 1
    reader = CommonPieces(pieces, in_memory(shard_name(0), altered, ShardParts.of(altered)))
    assert b"".join(reader.read(0, 8)) == bytes(data[:8])
    # What was not sent is read from the shard.
    assert b"".join(reader.read(0, len(altered))) == bytes(altered)
    assert b"".join(CommonPieces({}, shard).read(0, 8)) == bytes(data[:8])
