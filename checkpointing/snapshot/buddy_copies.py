"""Copies of each node's shards in the memory of the next node, so that losing one node loses no snapshot.

They are sent through the process group, in a thread of its own: training does not wait for them. Each rank sends its
shard to the rank of the same place on the next node, from the arena that it has copied it into, and receives one behind
the files of its own node. What has arrived is compared with the digest that its sender has computed.

The idea is that of Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints"
(SOSP 2023), with groups of two in a ring.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from dataclasses import dataclass

from checkpointing.agent.client import AgentClient
from checkpointing.agent.protocol import Guest
from checkpointing.errors import CheckpointError
from checkpointing.format.shard_index import ShardParts, shard_name
from checkpointing.process.ranks import Part, Ranks

logger = logging.getLogger("checkpointing")

# Bytes of one message: enough for the wire, and several are under way at a time.
_PART_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class _Exchange:
    """One snapshot whose shards are to be copied; what this rank sends, and where it puts what it receives."""

    step: int
    arena: int
    own: memoryview
    guest: memoryview
    offset: int


def has_buddies(ranks: Ranks) -> bool:
    """Return whether each rank has one in the same place on the next node; called by all ranks together."""
    sizes = set(ranks.gather(ranks.local_world_size))
    return sizes == {ranks.local_world_size} and ranks.local_world_size < ranks.world_size


class BuddyCopies:
    """Copies shards between nodes; every rank makes the same calls in the same order.

    Args:
        client: The connection to the node's agent.
        ranks: This rank, with a group that only the thread of this object uses.

    Attributes:
        guest: The rank whose shard this one keeps a copy of.
    """

    def __init__(self, client: AgentClient, ranks: Ranks) -> None:
        self._client, self._ranks = client, ranks
        self._buddy = (ranks.rank + ranks.local_world_size) % ranks.world_size
        self.guest = (ranks.rank - ranks.local_world_size) % ranks.world_size
        self._work: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_broken = False

    @property
    def guests(self) -> range:
        """The ranks whose shards are kept on this node."""
        first = self.guest - self._ranks.local_rank
        return range(first, first + self._ranks.local_world_size)

    def exchange(self, step: int, arena: int, own: memoryview, guest: memoryview, offset: int) -> None:
        """Begin to copy the shards of a snapshot, after the agent has heard that this rank will receive one.

        Args:
            step: Step of the snapshot.
            arena: Number of its arena.
            own: This rank's shard, in the arena.
            guest: Memory for the other's, in the arena.
            offset: Place of that memory in the arena.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-buddy", daemon=True)
            self._thread.start()
        self._work.put(_Exchange(step, arena, own, guest, offset))

    def close(self) -> None:
        """Wait until all copies have been made, end the thread, and give the group up."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
        self._break()

    def _break(self) -> None:
        """Copy nothing any more; ranks that wait for this one learn of it at once."""
        if not self._is_broken:
            self._is_broken = True
            self._ranks.close_group()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            guest = None
            try:
                guest = self._copy(work) if not self._is_broken else None
            # Most likely, a rank is gone and the attempt ends. If not, nobody may wait for a copy all the same.
            except Exception as error:
                logger.warning(
                    "the shards of step %d were not copied to another node, and later ones will not be: %s",
                    work.step,
                    error,
                )
                self._break()
            # The training thread notices by itself that the agent is gone.
            with contextlib.suppress(CheckpointError):
                self._client.received(work.step, work.arena, guest)

    def _copy(self, work: _Exchange) -> Guest | None:
        """Send and receive; return what has come, or None if it is not what was sent."""
        self._ranks.transfer(_parts(work.own, self._buddy), _parts(work.guest, self.guest))
        sent, received = (ShardParts.of(data).digest for data in (work.own, work.guest))
        # Also the sign that all copies have been made: before, none of them is of use.
        said = self._ranks.gather((work.step, sent))
        if any(step != work.step for step, _ in said):
            raise RuntimeError("the ranks have copied shards of different steps")
        if said[self.guest][1] != received:
            logger.warning("the copy of another node's shard of step %d was altered on its way", work.step)
            return None
        return Guest(shard_name(self.guest), work.offset, work.guest.nbytes, received)


def _parts(data: memoryview, rank: int) -> list[Part]:
    starts = range(0, len(data), _PART_BYTES)
    return [(data[start : start + _PART_BYTES], rank, tag) for tag, start in enumerate(starts)]
