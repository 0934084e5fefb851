"""Checkpoints that were read with other bytes than were written, and what it takes to condemn one.

A proxy, a cache or a network card that damages what it passes on damages every checkpoint that is read through it. So
a checkpoint is read again before it counts as damaged: from a disk once, past the page cache; from elsewhere over new
connections, until it has been wrong in the same way for some minutes. Only then is it left out. It is renamed if
another one can be read and it is still wrong then; if none can, the place is at fault, and not the checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Seconds between two reads of a checkpoint on a disk.
_LOCAL_PAUSE_S = 0.5
# Reads of one on a disk that were all wrong, each in another way.
_MOST_LOCAL_READS = 3
# Between two reads of another one: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# For a checkpoint after one that was wrong for all of the patience.
_SHORT_PATIENCE_S = 5.0

# Step and tier, counted from the nearest.
Key = tuple[int, int]


@dataclass(frozen=True)
class Condemned:
    """A checkpoint that is damaged: its step and tier, the rank that has found it, and what is wrong."""

    step: int
    tier: int
    rank: int
    text: str
    is_remote: bool


@dataclass
class _Doubt:
    since: float
    rank: int
    text: str
    is_remote: bool
    reads: int = 1
    pause_s: float = _FIRST_PAUSE_S
    is_last_chance: bool = False


@dataclass
class Doubts:
    """What was read wrongly in one choice; rank 0 keeps it.

    Attributes:
        patience_s: Seconds for which a checkpoint that is not on a disk must have been wrong.
        clock: Seconds.
        sleep: Waits.
    """

    patience_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _found: dict[Key, _Doubt] = field(default_factory=dict)
    _condemned: dict[Key, Condemned] = field(default_factory=dict)
    _began: dict[Key, float] = field(default_factory=dict)

    def add(self, key: Key, text: str, *, rank: int, is_remote: bool) -> None:
        """Note that a checkpoint was read wrongly, once more perhaps."""
        now = self.clock()
        doubt = self._found.get(key)
        self._began.setdefault(key, now)
        if doubt is None or (doubt.text != text and (is_remote or doubt.reads + 1 < _MOST_LOCAL_READS)):
            # Other bytes than before say that the way to them is at fault: its time begins again.
            pause_s, reads = (doubt.pause_s, doubt.reads + 1) if doubt else (_FIRST_PAUSE_S, 1)
            self._found[key] = _Doubt(now, rank, text, is_remote, reads=reads, pause_s=pause_s)
            return
        doubt.reads += 1
        has_passed = any(one.is_remote for one in self._condemned.values())
        patience_s = (min(_SHORT_PATIENCE_S, self.patience_s) if has_passed else self.patience_s) if is_remote else 0.0
        if doubt.is_last_chance or now - doubt.since >= patience_s:
            self._condemned[key] = Condemned(*key, doubt.rank, text, is_remote)

    def is_condemned(self, key: Key) -> bool:
        """Return whether a checkpoint is damaged for good."""
        return key in self._condemned

    def is_hopeless(self, key: Key) -> bool:
        """Return whether a checkpoint was read wrongly in other ways again and again: its place is at fault."""
        longest_s = 2 * max(self.patience_s, _LONGEST_PAUSE_S)
        return key in self._began and not self.is_condemned(key) and self.clock() - self._began[key] > longest_s

    def wait(self, key: Key) -> bool:
        """Wait until it is time to read a checkpoint again; return at once, and False, if it was never doubted."""
        doubt = self._found.get(key)
        if doubt is None:
            return False
        self.sleep(min(doubt.pause_s, max(self.patience_s, _LOCAL_PAUSE_S)) if doubt.is_remote else _LOCAL_PAUSE_S)
        doubt.pause_s = min(2 * doubt.pause_s, _LONGEST_PAUSE_S)
        return True

    def reprieve(self) -> None:
        """Have those that are not on a disk read once more: another one could be read, so the way to them works."""
        for key in [key for key, one in self._condemned.items() if one.is_remote]:
            del self._condemned[key]
            self._found[key].is_last_chance, self._found[key].pause_s = True, 0.0

    @property
    def condemned(self) -> tuple[Condemned, ...]:
        """All that are damaged."""
        return tuple(self._condemned.values())

    def forget_condemned(self) -> None:
        """Note that they have been renamed."""
        self._condemned.clear()
