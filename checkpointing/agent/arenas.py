"""The arenas of one node: what each holds, and which may be refilled."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from checkpointing.commit.replicated_save import ReplicatedSave
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.format.digest import PART_BYTES, added, word_sum
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import ShardParts
from checkpointing.host.memory import DEFAULT_SHARE, available_bytes
from checkpointing.host.shared_memory import SharedMemory, round_up
from checkpointing.host.threads import side_by_side

logger = logging.getLogger(__name__)

NUM_ARENAS = 2
_GROWTH_SHARE = 64
_GROWTH_BYTES = 4 * 1024 * 1024


@functools.cache
def _warn_uncompared(missing: int) -> None:
    """Say once that snapshots cannot be compared; `missing` is the size of what nobody copied, in bytes."""
    logger.warning(
        "snapshots are not compared with the state that they were taken of: the ranks copied %s; please report it, "
        "with how the model is distributed",
        f"{missing} bytes too few" if missing > 0 else f"{-missing} bytes twice",
    )


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
        number: Identifies the arena; never used again.
        memory: The buffer.
        state: What it holds.
        step: Step of the snapshot.
        stage: Name of the snapshot's stage.
        copied_by: Local ranks that have copied their share.
        words: Sum of the words that each local rank has copied, of their source, and their size; see `word_sum`.
        not_finite: Names of tensors of it that hold NaN or infinity: it is of use for a post-mortem alone.
        info: Where in its run the snapshot was taken; None until the leader has copied.
        files: Name, offset and size in bytes of each file image.
        save: The save, where several nodes write the checkpoint; of what they hold all of, until that begins.
        digests: By file name, once computed.
        parts: Digests of the parts of files, by file name.
        digested: Set when all digests are known.
        num_tasks: Tasks of other threads that still use the buffer.
        commit_wanted: A commit was requested, and has not failed.
        damaged: A reader found other bytes than were digested; must not be published.
        publishes: This agent publishes it, and does not just write its share.
        is_saved: It is a share whose save is over, successful or not: nobody commits it again.
        is_spent: It is a share that nobody commits or resumes from any more.
        is_old: It is a share of an earlier attempt: nobody waits for what becomes of it.
        guests: Copies of another node's shards, which this node keeps for it: offset, size and digest, by name.
        receiving: Local ranks that are still receiving one.
        whole_since: When the snapshot became whole, by the agent's clock.
    """

    number: int
    memory: SharedMemory
    state: ArenaState = ArenaState.FREE
    step: int = -1
    stage: str = ""
    copied_by: set[int] = field(default_factory=set)
    words: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    info: SnapshotInfo | None = None
    files: list[tuple[str, int, int]] = field(default_factory=list)
    save: ShardedSave | ReplicatedSave | None = None
    digests: dict[str, str] = field(default_factory=dict)
    parts: dict[str, ShardParts] = field(default_factory=dict)
    digested: threading.Event = field(default_factory=threading.Event)
    num_tasks: int = 0
    commit_wanted: bool = False
    damaged: bool = False
    publishes: bool = False
    is_saved: bool = False
    is_spent: bool = False
    is_old: bool = False
    guests: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    receiving: set[int] = field(default_factory=set)
    whole_since: float = 0.0

    @property
    def share(self) -> ShardedSave | None:
        """The save, where the snapshot is only this node's share of a state; None otherwise."""
        return self.save if isinstance(self.save, ShardedSave) else None

    @property
    def is_usable(self) -> bool:
        """Whether it holds a whole snapshot that is not known to be damaged, and of use to somebody."""
        return self.state is ArenaState.WHOLE and not self.damaged and not self.is_spent

    @property
    def is_in_use(self) -> bool:
        """Whether somebody reads or writes it, whatever it holds."""
        return self.num_tasks > 0 or bool(self.receiving)

    def begin(self, step: int, stage: str, state: ArenaState = ArenaState.FILLING) -> None:
        """Forget the last snapshot, and begin that of a step."""
        self.state, self.step, self.stage = state, step, stage
        self.copied_by.clear()
        self.words.clear()
        self.receiving.clear()
        self.not_finite = ()
        self.digests, self.parts, self.guests, self.save = {}, {}, {}, None
        self.digested = threading.Event()
        self.commit_wanted = self.damaged = self.publishes = False
        self.is_saved = self.is_spent = self.is_old = False

    def digest(self) -> str | None:
        """Compute the digests of all files; return what is wrong with their bytes, if anything is.

        The digests come first: bytes that change between them and the sum are found, too.
        """
        for name, offset, size in self.files:
            self.parts[name] = ShardParts.of(self.view(offset, size))
            self.digests[name] = self.parts[name].digest
        captured = [one for one in self.words.values() if one is not None]
        missing = sum(size for *_, size in self.files) - sum(nbytes for _, nbytes in captured)
        if missing:
            # Several ranks have copied the same bytes, which their sum counts twice, or none has copied some.
            if len(captured) == len(self.words):
                _warn_uncompared(missing)
            return None
        arrived = added([word_sum(self.view(offset, size), offset) for _, offset, size in self.files])
        if arrived == added([words for words, _ in captured]):
            return None
        return "what arrived in memory is not what was captured: something else wrote to it, or to the state meanwhile"

    def changed_bytes(self, name: str) -> str | None:
        """Compare a file's bytes with their digest once more; return where they differ, if they do."""
        offset, size = next(place[1:] for place in self.files if place[0] == name)
        now = ShardParts.of(self.view(offset, size)).digests
        for number, (before, after) in enumerate(zip(self.parts[name].digests, now, strict=True)):
            if before != after:
                begin = number * PART_BYTES
                return (
                    f"{name} has changed in memory since it was captured, in bytes {begin:,} to "
                    f"{min(begin + PART_BYTES, size):,} (arena {self.number}, offset {offset + begin:#x})"
                )
        return None

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes, as into a file.

        Raises:
            OSError: They cannot be written.
        """
        while len(data):
            count = os.pwrite(self.memory.fd, data, offset)
            data, offset = data[count:], offset + count

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of the buffer."""
        return self.memory.buffer[offset : offset + nbytes]


class ArenaPool:
    """As many arenas as the memory limit allows, up to `NUM_ARENAS`. Used by the agent's main thread alone."""

    def __init__(self, memory_limit: int | None, on_short: Callable[[int, str], None]) -> None:
        """Create an empty pool.

        Args:
            memory_limit: Bytes that arenas may take; None for a share of the available memory.
            on_short: Called with the number of arenas and the reason, once for each number that is too small.
        """
        self.arenas: list[Arena] = []
        self._memory_limit = memory_limit
        self._on_short = on_short
        self._reported: int | None = None
        self._next_number = 0

    def newest(self, stage: str) -> Arena | None:
        """Return the arena with the newest usable snapshot of a stage; of two of a step, the later one."""
        usable = (arena for arena in self.arenas if arena.is_usable and arena.stage == stage)
        return max(usable, key=lambda arena: (arena.step, arena.whole_since), default=None)

    def take(self, nbytes: int, num_wanted: int = NUM_ARENAS, *, is_urgent: bool = False) -> Arena | None:
        """Return an arena to fill; None if all are in use, or there is no memory for one (`arenas` is empty then).

        Args:
            nbytes: Size of the snapshot.
            num_wanted: How many arenas there should be.
            is_urgent: Overwrite an older snapshot although other nodes have no copies of the newest yet.
        """
        self.allocate(nbytes, num_wanted)
        large = [arena for arena in self.arenas if arena.memory.nbytes >= nbytes]
        usable = [arena for arena in large if self._may_be_refilled(arena, is_urgent=is_urgent)]
        return min(
            usable, key=lambda arena: (arena.state is not ArenaState.FREE, arena.step, arena.whole_since), default=None
        )

    def allocate(self, nbytes: int, num_wanted: int = NUM_ARENAS) -> None:
        """Allocate arenas of at least `nbytes`; smaller ones are freed once they are not needed."""
        if sum(arena.memory.nbytes >= nbytes for arena in self.arenas) >= num_wanted:
            return
        capacity, limit = _capacity(nbytes), self._limit()
        held = sum(arena.memory.nbytes for arena in self.arenas)
        for arena in list(self.arenas):
            if arena.memory.nbytes < nbytes and self._may_be_refilled(arena):
                self.arenas.remove(arena)
                arena.memory.close()
                held -= arena.memory.nbytes
        why = f"{limit / 1e6:.0f} MB may be used (checkpoint.memory_limit)"
        number = min(num_wanted - len(self.arenas), max(limit - held, 0) // capacity)
        made, error = _make(capacity, number)
        if error is not None and number > 1 and not made:
            # Where there is memory for one, several at a time may each have got a part of it.
            made, error = _make(capacity, 1)
        if error is not None:
            why = f"the system refused more ({error.strerror})"
        for memory in made:
            self.arenas.append(Arena(self._next_number, memory))
            self._next_number += 1
        if len(self.arenas) < num_wanted and self._reported != len(self.arenas):
            self._reported = len(self.arenas)
            effect = (
                "one snapshot at a time: one is skipped while the last is being written"
                if self.arenas
                else "no snapshot in memory: every save blocks training until it is written"
            )
            reason = f"a snapshot takes {capacity / 1e6:.0f} MB, {NUM_ARENAS} are wanted, {why}; {effect}"
            self._on_short(len(self.arenas), reason)

    def reserve(self, nbytes: int, guests: int) -> bool:
        """Allocate all arenas; return whether there is memory for as many bytes of guests in each, too."""
        # The first rank's request decides: what is allocated for it changes what is free.
        large = [arena for arena in self.arenas if arena.memory.nbytes >= nbytes]
        if len(large) >= NUM_ARENAS:
            has_room = all(arena.memory.nbytes >= nbytes + guests for arena in large)
        else:
            has_room = NUM_ARENAS * _capacity(nbytes + guests) <= self._limit()
        self.allocate(nbytes + guests if has_room else nbytes)
        return has_room

    def _limit(self) -> int:
        """Return the bytes that all arenas may take."""
        if self._memory_limit is not None:
            return self._memory_limit
        held = sum(arena.memory.nbytes for arena in self.arenas)
        return held + int(available_bytes() * DEFAULT_SHARE)

    def _may_be_refilled(self, arena: Arena, *, is_urgent: bool = False) -> bool:
        if arena.is_in_use or arena.state not in (ArenaState.FREE, ArenaState.WHOLE):
            return False
        if arena.state is ArenaState.FREE or len(self.arenas) == 1:
            return True
        others = [other for other in self.arenas if other is not arena and other.is_usable]
        if arena.share is not None:
            # All nodes must keep the same one, and that is the newest, although their saves do not last equally long.
            others = [other for other in others if other.step > arena.step]
        # One that other nodes have no copy of yet is lost with this node.
        return any(is_urgent or not other.receiving for other in others)


def _capacity(nbytes: int) -> int:
    """Return the size of an arena: the log history grows with every save, which would need a new arena each time."""
    return round_up(nbytes + max(nbytes // _GROWTH_SHARE, _GROWTH_BYTES))


def _make(nbytes: int, number: int) -> tuple[list[SharedMemory], OSError | None]:
    """Make several pieces of memory at once, which takes no longer than one; return them, and why there are not all."""
    create = functools.partial(SharedMemory.create, "checkpoint-arena", nbytes)
    made, refusal = [], None
    for outcome in side_by_side([create] * number, "checkpoint-reserve"):
        try:
            made.append(outcome.result())
        except OSError as error:
            refusal = error
    return made, refusal
