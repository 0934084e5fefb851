"""Snapshots that no node holds whole: which of them are in memory entirely, and from whom each rank reads its part.

A node holds the shards of its own ranks, and copies of the next node's (`buddy_copies.py`). Any number of ranks on any
nodes can resume as long as these together are all. Each rank asks for what it needs when it needs it, through the
process group: what that is depends on its mesh, which need not be the one that the shards were written on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.shard_reading import PartCache, PartReader, ShardReader, in_memory
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.spread_files import SpreadFiles
from checkpointing.format.shard_index import ShardParts, shard_name, shard_rank
from checkpointing.process.ranks import Ranks


@dataclass(frozen=True)
class NodeShare:
    """What a node holds of a snapshot.

    Attributes:
        attempt: The attempt that computed it.
        identity: Of the save.
        world_size: Number of ranks that made it.
        ranks: Those whose shards the node holds.
    """

    attempt: int
    identity: str
    world_size: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class HeldShards:
    """A snapshot of which every shard is in the memory of some node.

    Attributes:
        attempt: The attempt that computed it.
        identity: Of the save.
        nodes: The first rank of each node that holds a share.
        servers: The rank that verifies each shard, and from whose node's memory it is read; by the shard's rank.
    """

    attempt: int
    identity: str
    nodes: tuple[int, ...]
    servers: Mapping[int, int]


def shares_by_step(snapshots: Sequence[OfferedSnapshot]) -> dict[int, NodeShare]:
    """Return what a node holds of snapshots that are spread over nodes, by step."""
    return {
        snapshot.info.step: NodeShare(
            snapshot.info.attempt,
            snapshot.save,
            snapshot.info.world_size,
            frozenset(rank for name in snapshot.files if (rank := shard_rank(name)) is not None),
        )
        for snapshot in snapshots
        if snapshot.save is not None
    }


def newest_attempt(offers: Sequence[Mapping[int, NodeShare]]) -> int:
    """Return the newest attempt of which a node holds a share; 0 if none does."""
    return max((share.attempt for held in offers for share in held.values()), default=0)


def resumable(
    offers: Sequence[Mapping[int, NodeShare]], nodes: Sequence[int], newest: int = 0
) -> dict[int, HeldShards]:
    """Find the snapshots of which all shards are in memory; pure, and equal on all ranks.

    Those of the newest attempt only: what an earlier one has left may belong to a line of history that was abandoned.

    Args:
        offers: What the node of each rank holds, by rank.
        nodes: The first rank of each rank's node, by rank.
        newest: The newest attempt of which a node holds anything else.

    Returns:
        By step.
    """
    newest = max(newest, newest_attempt(offers))
    shares = {node: offers[node] for node in sorted(set(nodes))}
    found = {}
    for step in {step for held in offers for step in held}:
        here = {node: held[step] for node, held in shares.items() if step in held and held[step].attempt == newest}
        # A step that was saved again has another identity.
        for identity in sorted({share.identity for share in here.values()}):
            same = {node: share for node, share in here.items() if share.identity == identity}
            servers = _servers({node: share.ranks for node, share in same.items()}, nodes)
            if set(servers) >= set(range(next(iter(same.values())).world_size)):
                found[step] = HeldShards(newest, identity, tuple(same), servers)
    return found


def _servers(held: Mapping[int, frozenset[int]], nodes: Sequence[int]) -> dict[int, int]:
    """Choose who serves each shard that some node holds: if it can be, the node of the rank of the same number.

    Args:
        held: The ranks whose shards each node holds, by the node's first rank.
        nodes: The first rank of each rank's node, by rank.
    """
    served: dict[int, list[int]] = {node: [] for node in held}
    for shard in sorted(frozenset().union(*held.values())):
        holders = [node for node, ranks in held.items() if shard in ranks]
        home = nodes[shard] if shard < len(nodes) else None
        served[home if home in holders else holders[shard % len(holders)]].append(shard)
    # The ranks of a node share the work.
    return {
        shard: node + number % nodes.count(node) for node, mine in served.items() for number, shard in enumerate(mine)
    }


_REQUEST, _ANSWER = 1, 2
_NO_MORE = -1


class ShardExchange:
    """Answers requests from construction to `close`; all ranks construct and close it together.

    Args:
        ranks: This rank, with a group that nothing else uses.
        served: The shards that others read from this rank, verified, by the rank that wrote them.
    """

    def __init__(self, ranks: Ranks, served: Mapping[int, memoryview]) -> None:
        self._ranks, self._served = ranks, served
        self._thread = threading.Thread(target=self._serve, name="checkpoint-shards", daemon=True)
        self._thread.start()

    def reader(self, server: int, shard: int) -> Callable[[int, memoryview], None]:
        """Return a function that fills memory with a shard's bytes from a place on, as `PartReader` uses it.

        It raises OSError where the other rank is gone.
        """

        def read(start: int, memory: memoryview) -> None:
            try:
                self._ranks.send(_numbers(shard, start, len(memory)), server, _REQUEST)
                self._ranks.receive(torch.frombuffer(memory, dtype=torch.uint8), server, _ANSWER)
            except RuntimeError as error:
                raise OSError(f"rank {server}, which holds a shard, does not answer: {error}") from error

        return read

    def close(self) -> None:
        """Wait until no rank reads any more, and end the thread."""
        self._ranks.barrier()
        self._ranks.send(_numbers(_NO_MORE, 0, 0), (self._ranks.rank + 1) % self._ranks.world_size, _REQUEST)
        self._thread.join()
        # What was sent last has arrived before the group is closed.
        self._ranks.barrier()
        self._ranks.close_group()

    def _serve(self) -> None:
        request = _numbers(0, 0, 0)
        while True:
            try:
                sender = self._ranks.receive(request, None, _REQUEST)
                shard, start, nbytes = request.tolist()
                if shard == _NO_MORE:
                    return
                part = self._served[shard][start : start + nbytes]
                self._ranks.send(torch.frombuffer(part, dtype=torch.uint8), sender, _ANSWER)
            # Of torch.distributed: a rank is gone, which the training thread finds by its own calls.
            except RuntimeError:
                return


def connect(spread: SpreadFiles, ranks: Ranks, held: HeldShards, share: OfferedSnapshot | None) -> None:
    """Let every rank read all shards of a snapshot in memory; called by all together.

    Args:
        spread: The snapshot's files, with the shards that this rank has verified.
        ranks: This rank, with a group that the training thread uses.
        held: Who serves which shard.
        share: What this rank's node holds, if anything.

    Raises:
        InvalidCheckpoint: What all ranks need cannot be read; on all of them.
    """
    parts: dict[int, ShardParts] = {}
    for theirs in ranks.gather(spread.served):
        parts |= theirs
    exchange = None
    if ranks.local_world_size < ranks.world_size:
        assert share is not None or not spread.served
        views = {shard: share.files[shard_name(shard)] for shard in spread.served} if share is not None else {}
        exchange = ShardExchange(ranks.with_new_group(), views)
    cache, readers = PartCache(), dict[int, ShardReader]()
    for shard, server in held.servers.items():
        name = shard_name(shard)
        if share is not None and name in share.files:
            # Its own, or a copy of another node's.
            readers[shard] = in_memory(name, share.files[name], parts[shard])
        else:
            assert exchange is not None
            readers[shard] = PartReader(parts[shard], exchange.reader(server, shard), cache, name)
    spread.read_from(readers, exchange.close if exchange is not None else lambda: None)
    if exchange is not None:
        # At once, where otherwise all ranks would ask for them.
        pieces: dict[int, bytes] | InvalidCheckpoint = {}
        if ranks.is_first:
            try:
                pieces = spread.common_pieces()
            except InvalidCheckpoint as error:
                pieces = error
        pieces = ranks.broadcast(pieces)
        if isinstance(pieces, InvalidCheckpoint):
            raise pieces
        spread.add_common_pieces(pieces)


def _numbers(shard: int, start: int, nbytes: int) -> torch.Tensor:
    return torch.tensor([shard, start, nbytes], dtype=torch.int64)
