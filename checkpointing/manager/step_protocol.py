"""What all ranks do at a step boundary: decided by rank 0's clock and by requests, and agreed by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpointing.host.heartbeat import CommitReport
from checkpointing.process.ranks import Flag, FlagSync
from checkpointing.snapshot.cadence import CadenceClock

# Ranks exchange flags about this often; where steps are longer, at each.
EXCHANGE_EVERY_S = 1.0
_MAX_INTERVAL = 100


@dataclass(frozen=True)
class Due:
    """What all ranks are to do at this step boundary.

    Attributes:
        stop: End after committing the state.
        save: Commit a snapshot.
        snapshot: Make a snapshot in memory.
        committed: The save that `CheckpointManager.awaited` names is committed.
        not_committed: That save will not be committed.
        differs: A rank has computed a step again, and it is not what it was before.
    """

    stop: bool = False
    save: bool = False
    snapshot: bool = False
    committed: bool = False
    not_committed: bool = False
    differs: bool = False


@dataclass(frozen=True)
class Measured:
    """What rank 0's clock decides by.

    Attributes:
        snapshot_s: Seconds that a snapshot costs; None before the first.
        is_preparing: Memory for snapshots is being made ready.
        last_commit: The newest commit.
    """

    snapshot_s: float | None
    is_preparing: bool
    last_commit: CommitReport


class StepProtocol:
    """Finds out at each step boundary what is due; every rank calls it in lock-step.

    Args:
        flag_sync: Exchanges the flags.
        clock: Knows what is due by time; only rank 0's counts.
        is_first: Whether this is rank 0.
        stop_wanted: Whether this rank has been asked to stop.
        differs: Whether this rank has found a difference that the others do not know of.
        saves_wanted: How often this rank has been asked to save, in all.
        measure: Returns what the clock decides by; called on rank 0 before each exchange.
        is_committed: Whether storage has the checkpoint of a step.
        every_s: Seconds between two exchanges; where steps are longer, there is one at each.

    Attributes:
        awaited: A step whose commit a caller waits for `Due` to report.
    """

    def __init__(
        self,
        flag_sync: FlagSync,
        clock: CadenceClock,
        *,
        is_first: bool,
        stop_wanted: Callable[[], bool],
        differs: Callable[[], bool],
        saves_wanted: Callable[[], int],
        measure: Callable[[], Measured],
        is_committed: Callable[[int], bool],
        every_s: float = EXCHANGE_EVERY_S,
    ) -> None:
        self._flag_sync, self._clock, self._is_first = flag_sync, clock, is_first
        self._stop_wanted, self._measure, self._is_committed = stop_wanted, measure, is_committed
        self._differs, self._saves_wanted, self._every_s = differs, saves_wanted, every_s
        # How many requests to save this rank has passed on, and how many of them are agreed on.
        self._saves_asked = self._saves_agreed = 0
        # What is agreed on for the end of this step.
        self._agreed: set[Flag] = set()
        # Since the last exchange.
        self._steps_seen, self._asked_at = 0, time.monotonic()
        self.awaited: int | None = None
        self._answered: int | None = None
        # What rank 0 says once, and all have agreed on while `agree_to_stop` asked for something else.
        self._left: set[Flag] = set()

    def end_of_step(self, step: int) -> Due:
        """Exchange flags, where that is due, and return what is due now."""
        self._steps_seen += 1
        self._agreed = agreed = self._flag_sync.drain() | self._left
        self._left = set()
        if Flag.SAVE in agreed:
            self._saves_agreed = self._saves_asked
        self._flag_sync.exchange(self._ask)
        snapshot_due, save_due = self._clock.due_by_step(step)
        return Due(
            Flag.STOP in agreed,
            save_due or Flag.SAVE in agreed,
            snapshot_due or Flag.SNAPSHOT in agreed,
            Flag.COMMITTED in agreed,
            Flag.NOT_COMMITTED in agreed,
            Flag.DIFFERS in agreed,
        )

    def agree_to_stop(self) -> bool:
        """Return whether any rank had been asked to stop at the previous call; see `CheckpointManager`."""
        agreed = self._flag_sync.exchange(self._ask_to_stop, now=True)
        self._left |= agreed & {Flag.COMMITTED, Flag.NOT_COMMITTED}
        return Flag.STOP in agreed

    def saved(self, *, commit: bool) -> None:
        """Note that a snapshot was made, to be committed or not."""
        self._clock.done(time.monotonic(), commit=commit)

    def drain(self) -> None:
        """Wait for the exchange in flight."""
        self._flag_sync.drain()

    def _ask_to_stop(self) -> tuple[set[Flag], int]:
        return ({Flag.STOP} if self._stop_wanted() else set()), 1

    def _ask(self) -> tuple[set[Flag], int]:
        """Return this rank's flags, and how many steps rank 0 proposes until the next exchange."""
        wanted, _ = self._ask_to_stop()
        if self._differs():
            wanted.add(Flag.DIFFERS)
        if (count := self._saves_wanted()) != self._saves_agreed:
            wanted.add(Flag.SAVE)
            self._saves_asked = count
        if not self._is_first:
            return wanted, 1
        now = time.monotonic()
        measured = self._measure()
        due = self._clock.due_by_time(now, measured.snapshot_s, measured.last_commit, preparing=measured.is_preparing)
        # What is agreed on by now is done at the end of this step.
        wanted |= {flag for flag, wish in zip((Flag.SNAPSHOT, Flag.SAVE), due, strict=True) if wish} - self._agreed
        if self.awaited is not None and self.awaited != self._answered:
            last = measured.last_commit.step
            if last >= self.awaited:
                # The report of the newest commit replaces those just before it.
                known = last == self.awaited or self._is_committed(self.awaited)
                wanted.add(Flag.COMMITTED if known else Flag.NOT_COMMITTED)
                self._answered = self.awaited
        step_s = (now - self._asked_at) / max(self._steps_seen, 1)
        self._steps_seen, self._asked_at = 0, now
        return wanted, max(1, min(int(self._every_s / step_s), _MAX_INTERVAL))
