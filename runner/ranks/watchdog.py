"""Finds ranks that make no progress, by their heartbeats alone. Pure: no process, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.config.schema import RestartConfig

# The limit of a step: this factor times the 99th percentile of the run's own steps, plus these seconds.
_STEP_FACTOR = 3.0
_STEP_MARGIN_S = 5.0
# Seconds. With one look per second, a stopped process is found within 5 s.
_STOPPED_S = 3.5
_MIN_SAMPLES = 3
_NUM_SAMPLES = 1000
# Seconds between two looks after which this process was itself stopped (SIGSTOP, a suspended node).
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
class Hang:
    """Ranks that hang, by their local ranks, and for how long they were silent, doing what, beyond which limit."""

    slots: tuple[int, ...]
    reason: str


@dataclass
class _Seen:
    beats: int
    step: int
    since: float


class Watchdog:
    """Compares heartbeats over time; `look` is called about twice a second.

    Attributes:
        busy: Whether, at the last look, a rank was legitimately not computing steps.
        patience: A factor of the limit that comes from the run's own step times.
        patience_used_up: Whether a rank has exceeded that limit.
    """

    def __init__(self, limits: RestartConfig, *, watch_start: bool, now: float) -> None:
        """Begin to watch; with `watch_start`, every rank must send heartbeats, which a user's script need not."""
        self._limits = limits
        self._watch_start = watch_start
        hang_s = limits.hang_timeout_s or _STEP_MARGIN_S
        self._least_s = min(hang_s, limits.first_step_timeout_s, limits.quiet_timeout_s)
        self._began = self._looked = now
        self._seen: dict[int, _Seen] = {}
        self._step_times: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._start_time = 0.0
        self.busy = self.patience_used_up = False
        self.patience = 1.0

    def look(self, beats: Sequence[Heartbeat], now: float, *, others_busy: bool = False) -> Hang | None:
        """Find ranks that hang, by the newest heartbeat of each, in the order of their local ranks.

        With `others_busy`, a rank of another node is busy, and ranks here may be waiting for it.
        """
        self._keep_time(beats, now)
        for slot, beat in enumerate(beats):
            seen = self._seen.get(slot)
            if seen is None or seen.beats != beat.beats:
                if seen is not None and beat.step_s > 0 and beat.step > seen.step:
                    self._step_times.append(beat.step_s)
                self._seen[slot] = _Seen(beat.beats, beat.step, now if beat.beats else self._began)
        late = [slot for slot, beat in enumerate(beats) if self._is_late(slot, beat, beats, now)]
        self.busy = any(beat.phase in _BUSY and slot not in late for slot, beat in enumerate(beats))
        if self.busy or others_busy:
            # A rank in mid-step waits for the one that compiles, saves or evaluates; its own time begins afterwards.
            waiting = [slot for slot, beat in enumerate(beats) if beat.phase is Phase.TRAINING]
            late = [slot for slot in late if slot not in waiting]
            for slot in waiting:
                self._seen[slot].since = now
        if not late:
            return None
        # Ranks that wait for the hung one are late, too; the hung one has made the least progress.
        first = min(late, key=lambda slot: (beats[slot].step, beats[slot].beats))
        beat, silent = beats[first], now - self._seen[first].since
        limit, why = self._limit(beat)
        self.patience_used_up |= self._is_derived(beat)
        return Hang(
            tuple(late),
            f"no heartbeat for {silent:.1f} s after step {beat.step} ({_DOING[beat.phase]}); the limit is "
            f"{limit:.1f} s ({why})",
        )

    def _keep_time(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Leave time out that no rank is to blame for."""
        if now - self._looked > _LOOK_GAP_S:
            gap = now - self._looked
            self._began += gap
            for known in self._seen.values():
                known.since += gap
        self._looked = now
        if self._is_unwatched_start(beats):
            # What a script does before it resumes may take longer on one rank than on another.
            self._began = now
            for known in self._seen.values():
                known.since = now
        if (start_time := max((beat.start_time for beat in beats), default=0.0)) != self._start_time:
            # Another training of the same script: its steps may be of another length.
            self._start_time = start_time
            self._step_times.clear()

    def _is_late(self, slot: int, beat: Heartbeat, beats: Sequence[Heartbeat], now: float) -> bool:
        if beat.phase is Phase.DONE and not self._watch_start:
            return False  # a script may take any time after training
        if self._is_unwatched_start(beats):
            return False
        silent = now - self._seen[slot].since
        # The first comparison is nearly always enough; computing the limit takes time from training.
        return silent > self._least_s and silent > self._limit(beat)[0]

    def _limit(self, beat: Heartbeat) -> tuple[float, str]:
        """Return the seconds allowed, and the setting or figure that they come from."""
        limits = self._limits
        if beat.phase is Phase.COMPILING:
            return limits.first_step_timeout_s, "restart.first_step_timeout_s"
        if beat.phase is not Phase.TRAINING:
            return limits.quiet_timeout_s, "restart.quiet_timeout_s"
        if self._is_derived(beat):
            p99 = self.p99_s
            why = f"3 x the 99th percentile of step times, {p99:.2f} s, + 5 s"
            if self.patience > 1:
                why = f"{self.patience:g} x ({why}), as the attempt before had hung, too"
            return self.patience * (_STEP_FACTOR * p99 + _STEP_MARGIN_S), why
        if beat.step > beat.start_step and limits.hang_timeout_s is not None:
            return limits.hang_timeout_s, "restart.hang_timeout_s"
        return limits.first_step_timeout_s, "restart.first_step_timeout_s"

    def _is_derived(self, beat: Heartbeat) -> bool:
        """Return whether the limit comes from the run's own step times."""
        has_times = self._limits.hang_timeout_s is None and len(self._step_times) >= _MIN_SAMPLES
        return has_times and beat.phase is Phase.TRAINING and beat.step > beat.start_step

    def _is_unwatched_start(self, beats: Sequence[Heartbeat]) -> bool:
        return not self._watch_start and all(beat.phase is Phase.STARTING for beat in beats)

    @property
    def p99_s(self) -> float:
        """99th percentile of the steps seen, in seconds; 0 before the first."""
        ordered = sorted(self._step_times)
        return ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)] if ordered else 0.0


class StoppedProcesses:
    """Finds processes that were stopped (SIGSTOP), which make no progress whatever they were doing."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def look(self, states: Mapping[int, str], now: float) -> list[int]:
        """Return which processes have been stopped for too long, in order; called about once a second.

        Their states are as in ps(1), by a number of the caller's.
        """
        if now - self._looked > _LOOK_GAP_S:
            self._since.clear()
        self._looked = now
        self._since = {rank: self._since.get(rank, now) for rank, state in states.items() if state == "T"}
        return sorted(rank for rank, since in self._since.items() if now - since > _STOPPED_S)
