"""One shared page per rank: its heartbeat, the flags of the supervisor, and the newest commit."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from checkpointing.host.shared_memory import SharedMemory


class Phase(IntEnum):
    """What a rank is doing, as its heartbeat says."""

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    SAVING = 3
    DONE = 4
    IDLE = 5  # no step runs: an evaluation, a change of epoch
    COMPILING = 6  # torch.compile runs, in the first step or in a later one


class Heartbeat(NamedTuple):
    """A rank's last sign of life. Times are seconds of `checkpointing.host.heartbeat`; 0 where it has not come so far.

    Attributes:
        phase: what it was doing.
        step: last finished global step.
        time: when that step ended.
        start_step: step that this attempt started from.
        start_time: when its first step could begin.
        step_s: how long the last step took, in seconds; 0 where something else fell into it.
        beats: number of heartbeats so far; a watchdog sees it grow.
    """

    phase: Phase
    step: int
    time: float
    start_step: int
    start_time: float
    step_s: float = 0.0
    beats: int = 0


@dataclass(frozen=True)
class CommitReport:
    """The agent's last commit, by which rank 0 decides when the next one is worth its price.

    It took `duration_s` from the whole snapshot to the durable checkpoint, and `cpu_s` of processor time to write and
    digest.
    """

    step: int = -1  # which means: none yet
    duration_s: float = 0.0
    cpu_s: float = 0.0


class ControlPage:
    """Heartbeats of a node's ranks, flags and the last commit, in one shared page: no system call to use it.

    Each slot has one writer (its rank; the agent for the flags); each field is an aligned 8-byte word, and slots are
    copied as a whole, so a reader sees of each field old or new, never half. (`struct.pack_into` fills its target with
    zeros first, and both it and `unpack_from` go byte by byte.)
    """

    _SLOT = struct.Struct("<QQdQddQ")
    _SLOT_BYTES = 64
    _REPORT = struct.Struct("<qdd")
    _REPORT_OFFSET = 8
    _SAVES = struct.Struct("<Q")
    _SAVES_OFFSET = 32
    _FLAGS_BYTES = 64

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.num_slots = (memory.nbytes - self._FLAGS_BYTES) // self._SLOT_BYTES

    @classmethod
    def create(cls, num_slots: int = 1024) -> ControlPage:
        """Create a page, with a slot for each rank of the node."""
        page = cls(SharedMemory.create("checkpoint-control", cls._FLAGS_BYTES + num_slots * cls._SLOT_BYTES))
        page.last_commit = CommitReport()
        return page

    @classmethod
    def attach(cls, fd: int) -> ControlPage:
        """Map the page of another process by its file descriptor."""
        return cls(SharedMemory.attach(fd))

    @property
    def fd(self) -> int:
        """The file descriptor, for other processes."""
        return self._memory.fd

    @property
    def stop_requested(self) -> bool:
        """Whether the ranks are to stop at the next step boundary."""
        return self._memory.buffer[0] != 0

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._memory.buffer[0] = int(value)

    @property
    def saves_requested(self) -> int:
        """How often the supervisor has asked for a checkpoint in this attempt."""
        return int(self._get(self._SAVES, self._SAVES_OFFSET)[0])

    @saves_requested.setter
    def saves_requested(self, value: int) -> None:
        self._put(self._SAVES, self._SAVES_OFFSET, value)

    @property
    def last_commit(self) -> CommitReport:
        """The newest commit."""
        return CommitReport(*self._get(self._REPORT, self._REPORT_OFFSET))

    @last_commit.setter
    def last_commit(self, value: CommitReport) -> None:
        self._put(self._REPORT, self._REPORT_OFFSET, value.step, value.duration_s, value.cpu_s)

    def write(self, slot: int, beat: Heartbeat) -> None:
        """Write the heartbeat of a slot; raises ValueError where there is none."""
        self._put(self._SLOT, self._offset(slot), *beat)

    def read(self, slot: int) -> Heartbeat:
        """Return the heartbeat of a slot; raises ValueError where there is none."""
        phase, *fields = self._get(self._SLOT, self._offset(slot))
        return Heartbeat(Phase(phase), *fields)

    def clear(self) -> None:
        """Forget all heartbeats (a new attempt begins); the flags stay."""
        start = self._FLAGS_BYTES
        self._memory.buffer[start:] = bytes(self._memory.nbytes - start)

    def close(self) -> None:
        """Unmap the page."""
        self._memory.close()

    def _put(self, layout: struct.Struct, offset: int, *fields: float) -> None:
        self._memory.buffer[offset : offset + layout.size] = layout.pack(*fields)

    def _get(self, layout: struct.Struct, offset: int) -> tuple[Any, ...]:
        return layout.unpack(bytes(self._memory.buffer[offset : offset + layout.size]))

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.num_slots - 1}")
        return self._FLAGS_BYTES + slot * self._SLOT_BYTES


def machine_clock() -> float:
    """Return the seconds since this machine was booted: the same in all processes, whatever the wall clock does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
