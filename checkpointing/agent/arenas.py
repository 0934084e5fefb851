"""The arenas of one node: what each holds, and which may be filled anew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from checkpointing.manifest import SnapshotInfo
from checkpointing.memory import DEFAULT_SHARE, available_bytes
from checkpointing.shared_memory import SharedMemory, round_up

NUM_ARENAS = 2
_GROWTH_SHARE = 64
_GROWTH_BYTES = 4 * 1024 * 1024


class ArenaState(Enum):
    """FREE → FILLING (ranks copy) or FETCHING (read from storage) → WHOLE → FILLING, FETCHING or FREE again."""

    FREE = auto()
    FILLING = auto()
    FETCHING = auto()
    WHOLE = auto()


@dataclass
class Arena:
    """One buffer that holds one snapshot at a time.

    Attributes:
        files: name, offset and size in bytes of each file image.
        digests: by file name, once computed.
        digested: set when they are.
        num_tasks: tasks of other threads that still use the buffer.
        commit_wanted: a commit was asked for, and has not failed.
        stage: the stage of the run that the snapshot is of.
        damaged: a reader found other bytes than were digested; must not be published.
    """

    number: int
    memory: SharedMemory
    state: ArenaState = ArenaState.FREE
    step: int = -1
    stage: str = ""
    copied_by: set[int] = field(default_factory=set)
    info: SnapshotInfo | None = None
    files: list[tuple[str, int, int]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    digested: threading.Event = field(default_factory=threading.Event)
    num_tasks: int = 0
    commit_wanted: bool = False
    damaged: bool = False
    whole_since: float = 0.0

    @property
    def is_usable(self) -> bool:
        """It holds a whole snapshot that nobody has found damaged."""
        return self.state is ArenaState.WHOLE and not self.damaged

    def begin(self, step: int, stage: str, state: ArenaState = ArenaState.FILLING) -> None:
        """Forget the last snapshot and let this step's be written."""
        self.state, self.step, self.stage = state, step, stage
        self.copied_by.clear()
        self.digests = {}
        self.digested = threading.Event()
        self.commit_wanted = self.damaged = False

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.memory.buffer[offset : offset + nbytes]


class ArenaPool:
    """As many arenas as the memory limit allows, up to `NUM_ARENAS`. Used by the agent's main thread alone."""

    def __init__(self, memory_limit: int | None, on_short: Callable[[int, str], None]) -> None:
        """
        Args:
            memory_limit: bytes; None for a share of what is free.
            on_short: told once for each number of arenas below the wanted one, and why.
        """
        self.arenas: list[Arena] = []
        self._memory_limit = memory_limit
        self._on_short = on_short
        self._told: int | None = None
        self._next_number = 0

    def newest(self, stage: str) -> Arena | None:
        """Of the whole, undamaged snapshots of a stage."""
        usable = (arena for arena in self.arenas if arena.is_usable and arena.stage == stage)
        return max(usable, key=lambda arena: arena.step, default=None)

    def take(self, nbytes: int, num_wanted: int = NUM_ARENAS) -> Arena | None:
        """An arena to fill; None where all are in use, or there is no memory for even one (`arenas` is empty then)."""
        self.allocate(nbytes, num_wanted)
        usable = [arena for arena in self.arenas if arena.memory.nbytes >= nbytes and self._may_be_refilled(arena)]
        return min(usable, key=lambda arena: (arena.state is not ArenaState.FREE, arena.step), default=None)

    def allocate(self, nbytes: int, num_wanted: int = NUM_ARENAS) -> None:
        """Have arenas of at least `nbytes`; those that are too small go when nobody needs them."""
        if sum(arena.memory.nbytes >= nbytes for arena in self.arenas) >= num_wanted:
            return
        # The log history grows with every save; without some air, so would the arena, all of it anew each time.
        capacity = round_up(nbytes + max(nbytes // _GROWTH_SHARE, _GROWTH_BYTES))
        held = sum(arena.memory.nbytes for arena in self.arenas)
        limit = self._memory_limit
        if limit is None:
            limit = held + int(available_bytes() * DEFAULT_SHARE)
        for arena in list(self.arenas):
            if arena.memory.nbytes < nbytes and self._may_be_refilled(arena):
                self.arenas.remove(arena)
                arena.memory.close()
                held -= arena.memory.nbytes
        why = f"{limit / 1e6:.0f} MB may be used (checkpoint.memory_limit)"
        while len(self.arenas) < num_wanted and held + capacity <= limit:
            try:
                memory = SharedMemory.create("checkpoint-arena", capacity)
            except OSError as error:
                why = f"the system refused more ({error.strerror})"
                break
            held += memory.nbytes
            self.arenas.append(Arena(self._next_number, memory))
            self._next_number += 1
        if len(self.arenas) < num_wanted and self._told != len(self.arenas):
            self._told = len(self.arenas)
            effect = (
                "one snapshot at a time: one is skipped while the last is being written"
                if self.arenas
                else "no snapshot in memory: every save blocks training until it is written"
            )
            reason = f"a snapshot takes {capacity / 1e6:.0f} MB, {NUM_ARENAS} are wanted, {why}; {effect}"
            self._on_short(len(self.arenas), reason)

    def _may_be_refilled(self, arena: Arena) -> bool:
        if arena.state is ArenaState.FREE:
            return arena.num_tasks == 0
        if arena.state is not ArenaState.WHOLE or arena.num_tasks > 0:
            return False
        return len(self.arenas) == 1 or any(other.is_usable for other in self.arenas if other is not arena)
