"""The step records of a node's ranks, in memory that outlives them."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointing.format.layout import step_record_name
from checkpointing.format.step_record import RING_BYTES, newest_step
from checkpointing.host.shared_memory import SharedMemory


class StepRecords:
    """One ring for each rank of the node, as long as the agent lives: see `StepRing`."""

    def __init__(self) -> None:
        self._rings: dict[int, SharedMemory] = {}
        # Global ranks, by the local ones.
        self._ranks: dict[int, int] = {}

    def of_rank(self, local_rank: int, rank: int) -> SharedMemory:
        """Return a rank's ring, with what earlier attempts have recorded."""
        self._ranks[local_rank] = rank
        if local_rank not in self._rings:
            self._rings[local_rank] = SharedMemory.create("step-record", RING_BYTES)
        return self._rings[local_rank]

    def files_after(self, step: int) -> Iterator[tuple[str, bytes]]:
        """Yield name and bytes of each rank's record that goes further than a step, as a later process reads it."""
        for local_rank, memory in self._rings.items():
            data = bytes(memory.buffer[:RING_BYTES])
            if newest_step(data) > step:
                yield step_record_name(self._ranks[local_rank]), data
