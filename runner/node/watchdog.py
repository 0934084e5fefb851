"""Finds ranks that have stopped making progress, by their heartbeats alone. No process, no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointing.heartbeat import Heartbeat, Phase
from runner.config.schema import RestartConfig

# A step may take so many times the 99th percentile of this run's own steps, and so many seconds more.
_STEP_FACTOR = 3.0
_STEP_MARGIN_S = 5.0
# With a look a second, what somebody has stopped is found within 5 s.
_STOPPED_S = 3.5
_MIN_SAMPLES = 3
_NUM_SAMPLES = 1000
# Whoever looks was stopped himself (SIGSTOP, a suspended machine) if he has not looked for longer than this.
_LOOK_GAP_S = 3.0

_BUSY = {Phase.RESTORING, Phase.SAVING, Phase.IDLE, Phase.COMPILING}
_DOING = {
    Phase.STARTING: "starting",
    Phase.RESTORING: "restoring",
    Phase.TRAINING: "training",
    Phase.SAVING: "saving",
    Phase.DONE: "ending",
    Phase.IDLE: "in an evaluation or between epochs",
    Phase.COMPILING: "compiling",
}


@dataclass(frozen=True)
class Limits:
    """Seconds without a sign of life.

    Attributes:
        hang_s: in a step; None: by the run's own step times.
        first_step_s: in the first steps, and while torch.compile works.
        quiet_s: in what is no step: start-up, restore, evaluation, saving.
    """

    hang_s: float | None
    first_step_s: float
    quiet_s: float

    @classmethod
    def of(cls, restart: RestartConfig) -> Limits:
        """As the user has set them."""
        return cls(restart.hang_timeout_s, restart.first_step_timeout_s, restart.quiet_timeout_s)


@dataclass(frozen=True)
class Hang:
    """Which local ranks stand still, for how long, and what they were doing."""

    slots: tuple[int, ...]
    reason: str


@dataclass
class _Seen:
    beats: int
    step: int
    since: float


class Watchdog:
    """`look` is to be called about twice a second, with the heartbeats of this machine's ranks."""

    def __init__(self, limits: Limits, *, watch_start: bool, now: float) -> None:
        """`watch_start`: whether a rank that has never given a sign of life ought to (a user's script need not)."""
        self._limits = limits
        self._watch_start = watch_start
        self._least_s = min(limits.hang_s or _STEP_MARGIN_S, limits.first_step_s, limits.quiet_s)
        self._began = self._looked = now
        self._seen: dict[int, _Seen] = {}
        self._step_times: deque[float] = deque(maxlen=_NUM_SAMPLES)
        # At the last look, a rank did what is no step, within its time.
        self.busy = False

    def look(self, beats: Sequence[Heartbeat], now: float, *, others_busy: bool = False) -> Hang | None:
        """The ranks that hang at this moment (monotonic seconds), if any do.

        Args:
            others_busy: on another machine a rank rightly does what is no step; ours may be waiting for it.
        """
        if now - self._looked > _LOOK_GAP_S:
            gap = now - self._looked
            self._began += gap
            for known in self._seen.values():
                known.since += gap
        self._looked = now
        for slot, beat in enumerate(beats):
            seen = self._seen.get(slot)
            if seen is None or seen.beats != beat.beats:
                if seen is not None and beat.step_s > 0 and beat.step > seen.step:
                    self._step_times.append(beat.step_s)
                self._seen[slot] = _Seen(beat.beats, beat.step, now if beat.beats else self._began)
        late = [slot for slot, beat in enumerate(beats) if self._is_late(slot, beat, beats, now)]
        self.busy = any(beat.phase in _BUSY and slot not in late for slot, beat in enumerate(beats))
        if self.busy or others_busy:
            # A rank in mid-step waits for the one that compiles, saves or evaluates; its own time begins thereafter.
            waiting = [slot for slot, beat in enumerate(beats) if beat.phase is Phase.TRAINING]
            late = [slot for slot in late if slot not in waiting]
            for slot in waiting:
                self._seen[slot].since = now
        if not late:
            return None
        # Those that wait for the one that hangs are late too: it is the one that has come least far.
        first = min(late, key=lambda slot: (beats[slot].step, beats[slot].beats))
        beat, silent = beats[first], now - self._seen[first].since
        limit, why = self._limit(beat)
        return Hang(
            tuple(late),
            f"no sign of life for {silent:.1f} s after step {beat.step} ({_DOING[beat.phase]}); allowed are "
            f"{limit:.1f} s ({why})",
        )

    def _is_late(self, slot: int, beat: Heartbeat, beats: Sequence[Heartbeat], now: float) -> bool:
        if beat.phase is Phase.DONE and not self._watch_start:
            return False  # a script may do what it likes after training
        if beat.phase is Phase.STARTING and not self._watch_start and all(b.phase is Phase.STARTING for b in beats):
            return False
        silent = now - self._seen[slot].since
        # Nearly always; working the limit out takes time from training.
        return silent > self._least_s and silent > self._limit(beat)[0]

    def _limit(self, beat: Heartbeat) -> tuple[float, str]:
        """Seconds allowed, and where that comes from."""
        limits = self._limits
        if beat.phase is Phase.COMPILING:
            return limits.first_step_s, "restart.first_step_timeout_s"
        if beat.phase is not Phase.TRAINING:
            return limits.quiet_s, "restart.quiet_timeout_s"
        if beat.step <= beat.start_step or (limits.hang_s is None and len(self._step_times) < _MIN_SAMPLES):
            return limits.first_step_s, "restart.first_step_timeout_s"
        if limits.hang_s is not None:
            return limits.hang_s, "restart.hang_timeout_s"
        p99 = self.p99_s
        return _STEP_FACTOR * p99 + _STEP_MARGIN_S, f"3 x the 99th percentile of step times, {p99:.2f} s, + 5 s"

    @property
    def p99_s(self) -> float:
        """99th percentile of the steps seen, in seconds; 0 before the first."""
        ordered = sorted(self._step_times)
        return ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)] if ordered else 0.0


class StoppedProcesses:
    """Ranks that somebody has stopped (SIGSTOP): whatever they were doing, they will say nothing more by themselves."""

    def __init__(self, patience_s: float = _STOPPED_S) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def look(self, states: Mapping[int, str], now: float) -> list[int]:
        """Those that have been stopped for too long; to be called about once a second.

        Args:
            states: of each living rank, as in ps(1).
            now: monotonic seconds.
        """
        if now - self._looked > _LOOK_GAP_S:
            self._since.clear()
        self._looked = now
        self._since = {rank: self._since.get(rank, now) for rank, state in states.items() if state == "T"}
        return sorted(rank for rank, since in self._since.items() if now - since > self._patience_s)
