"""Snapshots that no node holds whole: which of them all ranks can resume from in memory, and what they pass on.

Each rank reads what it held itself from its node's share. What every reader needs, headers above all, is in the first
rank's shard alone: it sends that to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.shard_reading import ShardElsewhere, ShardReader
from checkpointing.shards import ShardIndex, shard_rank


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


def resumable(offers: Sequence[Mapping[int, NodeShare]], newest: int = 0) -> dict[int, int]:
    """Find the snapshots of which every rank has its own shard on its node; pure, and equal on all ranks.

    Those of the newest attempt only: what an earlier one has left may belong to a line of history that was abandoned.

    Args:
        offers: What the node of each rank holds, by rank.
        newest: The newest attempt of which a node holds anything else.

    Returns:
        The attempt of each, by step.
    """
    newest = max(newest, newest_attempt(offers))
    found = {}
    for step, first in offers[0].items():
        shares = [held.get(step) for held in offers]
        if first.attempt == newest and first.world_size == len(offers):
            same = all(share is not None and share.identity == first.identity for share in shares)
            if same and all(share is not None and rank in share.ranks for rank, share in enumerate(shares)):
                found[step] = first.attempt
    return found


class CommonPieces:
    """What every reader needs of the first rank's shard; reads like a shard, see `ShardReader`.

    Args:
        pieces: Bytes by their place in the shard.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces

    @classmethod
    def read_from(cls, reader: ShardReader, index: ShardIndex) -> dict[int, bytes]:
        """Return what there is to pass on.

        Args:
            reader: Of the first rank's shard.
            index: Which bytes are in which shard.

        Raises:
            ValueError: The shard was altered.
        """
        return {
            piece.at: b"".join(reader.read(piece.at, piece.nbytes))
            for file in index.files.values()
            for piece in file.common
        }

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes, which must be of one piece.

        Raises:
            ShardElsewhere: They are not of a common piece.
        """
        place = max((place for place in self._pieces if place <= start), default=0)
        data = memoryview(self._pieces.get(place, b""))[start - place : start - place + nbytes]
        if len(data) != nbytes:
            raise ShardElsewhere
        yield data
