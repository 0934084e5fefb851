"""When a snapshot, or a commit, is worth its cost. No torch.

The interval that loses least is Young's, sqrt(2 · cost · MTBF) (J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974; refined by J. T. Daly, FGCS 22(3), 2006), but never so short that the
cost exceeds a share of the run's time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from checkpointing.host.heartbeat import CommitReport

Auto = Literal["auto"]
DEFAULT_OVERHEAD_CAP = 0.01
# The prior for the time between failures: one a day. It weighs as much as one day of observation.
PRIOR_MTBF_S = 86_400.0
# Snapshots of each kind to compare before overlapping is given up for blocking, or the other way round.
_TRIALS = 3
_SUSPICIOUS_RATIO = 1.5
_NEGLIGIBLE_S = 0.005
_WINDOW = 16
# Interval between commits while none has succeeded yet.
_UNKNOWN_COMMIT_S = 60.0


def mtbf_s(num_failures: int, observed_s: float) -> float:
    """Return the mean time between failures in seconds: the observation, combined with the prior."""
    return (PRIOR_MTBF_S + observed_s) / (1 + num_failures)


def best_interval_s(cost_s: float, mean_time_between_failures_s: float, overhead_cap: float) -> float:
    """Return the best number of seconds between two saves.

    This is Daly's higher-order form where the cost is less than twice the MTBF, else the MTBF itself; never less than
    cost / cap.

    Args:
        cost_s: Seconds that each save costs.
        mean_time_between_failures_s: Mean time between failures in seconds.
        overhead_cap: Share of the run's time that saves may cost.
    """
    mtbf = mean_time_between_failures_s
    if cost_s >= 2 * mtbf:
        best = mtbf
    else:
        ratio = math.sqrt(cost_s / (2 * mtbf))
        best = math.sqrt(2 * cost_s * mtbf) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s
    return max(best, cost_s / overhead_cap)


class CostModel:
    """Measures what snapshots cost training on this rank, and decides whether copying during training pays.

    It starts with overlapping. When that costs visibly more than the copy itself takes, it tries blocking and keeps the
    cheaper of the two: overlapping, unless the difference exceeds the noise of plain steps.

    Attributes:
        overlap: Whether to copy the next snapshot during training.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW)
        self._costs: dict[bool, deque[float]] = {True: deque(maxlen=_WINDOW), False: deque(maxlen=_WINDOW)}
        self._copies: deque[float] = deque(maxlen=_WINDOW)
        self._trying_blocking = False
        self.overlap = True
        # How the last snapshot was made. A script's choice, or a torn state, overrides what is chosen here.
        self._overlapped = True

    def plain_step(self, compute_s: float) -> None:
        """Record a step without a snapshot: the seconds from its start to the optimizer."""
        self._plain.append(compute_s)

    def snapshot(
        self, *, blocked_s: float, compute_s: float, copy_s: float, overlapped: bool, begin_s: float = 0.0
    ) -> float:
        """Record a step with a snapshot; return what the snapshot cost, in seconds.

        Args:
            blocked_s: Seconds that the training thread waited, and its device before the optimizer.
            compute_s: Seconds from the step's start to the optimizer.
            begin_s: Seconds that the device waited at the step's start; `compute_s` has them where the script waited
                for its device.
            copy_s: Seconds that the copy took.
            overlapped: Whether the copy ran during training.
        """
        usual = statistics.median(self._plain) if self._plain else compute_s
        cost = blocked_s + max(compute_s - usual, begin_s)
        self._costs[overlapped].append(cost)
        self._overlapped = overlapped
        self._copies.append(copy_s)
        self._choose()
        return cost

    @property
    def snapshot_s(self) -> float | None:
        """Seconds that a snapshot costs, if made like the last one; None before the first."""
        costs = self._costs[self._overlapped]
        return statistics.median(costs) if costs else None

    def _choose(self) -> None:
        overlapped, blocking = self._costs[True], self._costs[False]
        if self._trying_blocking:
            if len(blocking) >= _TRIALS:
                self._trying_blocking = False
                self.overlap = statistics.median(overlapped) <= statistics.median(blocking) + self._noise_s()
        elif self.overlap and not blocking and len(overlapped) >= _TRIALS:
            limit = _SUSPICIOUS_RATIO * statistics.median(self._copies) + _NEGLIGIBLE_S
            if statistics.median(overlapped) > limit + self._noise_s():
                self._trying_blocking, self.overlap = True, False

    def _noise_s(self) -> float:
        """Return the error of the median of a few trials that is due to steps differing anyway: two standard errors.

        The standard error of a median of n normal values is 1.25 sigma/√n; sigma is 1.48 times the median deviation.
        """
        if len(self._plain) < 2:
            return 0.0
        usual = statistics.median(self._plain)
        deviation = 1.48 * statistics.median(abs(step - usual) for step in self._plain)
        return 2 * 1.25 * deviation / math.sqrt(_TRIALS)


@dataclass(frozen=True)
class Cadence:
    """How often to snapshot and to commit.

    Attributes:
        snapshot_steps: Steps between snapshots in memory; None makes none but for commits.
        save_steps: Steps between commits to storage; None leaves them to the caller and `save_minutes`.
        save_minutes: Maximum minutes between commits.
        overhead_cap: Share of the run's time that `auto` may spend.
    """

    snapshot_steps: int | Auto | None = None
    save_steps: int | Auto | None = None
    save_minutes: float | None = None
    overhead_cap: float = DEFAULT_OVERHEAD_CAP

    def __post_init__(self) -> None:
        for name in ("snapshot_steps", "save_steps"):
            value = getattr(self, name)
            if value is not None and value != "auto" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is not allowed; use a number of steps from 1, auto, or None")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ValueError(f"save_minutes={self.save_minutes!r} is not allowed; use minutes above 0, or None")
        if not 0 < self.overhead_cap <= 1:
            raise ValueError(f"overhead_cap={self.overhead_cap!r} is not allowed; use a share above 0, at most 1")


class CadenceClock:
    """Decides when a snapshot or a commit is due by time. Rank 0's clock counts for all ranks.

    What is due by step number needs no clock; see `due_by_step`.

    Args:
        cadence: How often to snapshot and to commit.
        now: The present time on a monotonic clock, in seconds.
        num_failures: Failures of the run before this attempt.
        observed_s: Seconds in which these failures occurred.
    """

    def __init__(self, cadence: Cadence, now: float, num_failures: int = 0, observed_s: float = 0.0) -> None:
        self._cadence = cadence
        self._began = self._last_snapshot = self._last_commit = now
        self._num_failures, self._observed_s = num_failures, observed_s

    def due_by_step(self, step: int) -> tuple[bool, bool]:
        """Return whether a snapshot and a commit are due at this step, where the cadence is a number of steps."""
        snapshot, save = self._cadence.snapshot_steps, self._cadence.save_steps
        return (
            isinstance(snapshot, int) and step % snapshot == 0,
            isinstance(save, int) and step % save == 0,
        )

    def due_by_time(
        self, now: float, snapshot_s: float | None, commit: CommitReport, *, preparing: bool = False
    ) -> tuple[bool, bool]:
        """Return whether a snapshot and a commit are due by their measured cost.

        Args:
            now: The present time on a monotonic clock, in seconds.
            snapshot_s: Seconds that a snapshot costs; None before the first.
            commit: The newest commit.
            preparing: Memory for snapshots is being made ready; what is due by cost waits for it.
        """
        mtbf = mtbf_s(self._num_failures, self._observed_s + now - self._began)
        cadence = self._cadence
        # The cost is unknown until the first of each kind has been measured.
        snapshot_interval = best_interval_s(snapshot_s, mtbf, cadence.overhead_cap) if snapshot_s is not None else 0.0
        snapshot = cadence.snapshot_steps == "auto" and now - self._last_snapshot >= snapshot_interval
        save = cadence.save_minutes is not None and now - self._last_commit >= 60 * cadence.save_minutes
        if cadence.save_steps == "auto":
            if commit.step < 0 or snapshot_s is None:
                interval = 0.0 if self._last_commit == self._began else _UNKNOWN_COMMIT_S
            else:
                cost = snapshot_s + commit.cpu_s
                interval = max(best_interval_s(cost, mtbf, cadence.overhead_cap), commit.duration_s)
            save = save or (now - self._last_commit >= interval and not preparing)
        return snapshot and not preparing, save

    def done(self, now: float, *, commit: bool) -> None:
        """Record that a snapshot was made, to be committed or not."""
        self._last_snapshot = now
        if commit:
            self._last_commit = now
