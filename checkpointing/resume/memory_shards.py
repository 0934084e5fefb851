"""Snapshots that no node holds whole: which of them are in memory entirely, and from whom each rank reads its part.

A node holds the shards of its own ranks, and copies of the next node's (`buddy_copies.py`). Any number of ranks on any
nodes can resume as long as these together are all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.format.shard_index import shard_rank


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
