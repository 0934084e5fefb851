"""When a snapshot, or a commit, is worth its price. No torch.

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

from checkpointing.heartbeat import CommitReport

Auto = Literal["auto"]
DEFAULT_OVERHEAD_CAP = 0.01
# What is believed about failures before any was seen: one a day. Weighs as much as one day of observation.
PRIOR_MTBF_S = 86_400.0
# Snapshots of each kind that are compared before overlapping is given up for blocking, or the other way round.
_TRIALS = 3
_SUSPICIOUS_RATIO = 1.5
_NEGLIGIBLE_S = 0.005
_WINDOW = 16
# Between commits while none has succeeded yet.
_UNKNOWN_COMMIT_S = 60.0


def mtbf_s(num_failures: int, observed_s: float) -> float:
    """Mean time between failures: what was observed, tempered by the prior."""
    return (PRIOR_MTBF_S + observed_s) / (1 + num_failures)


def best_interval_s(cost_s: float, mean_time_between_failures_s: float, overhead_cap: float) -> float:
    """Seconds between two saves that cost `cost_s` each.

    Daly's higher-order form where the cost is below half the MTBF, the MTBF itself above; never below cost / cap.
    """
    mtbf = mean_time_between_failures_s
    if cost_s >= 2 * mtbf:
        best = mtbf
    else:
        ratio = math.sqrt(cost_s / (2 * mtbf))
        best = math.sqrt(2 * cost_s * mtbf) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s
    return max(best, cost_s / overhead_cap)


class CostModel:
    """What snapshots cost training on this rank, from its own steps; decides whether copying beside training pays.

    Overlapping is the start. When it costs visibly more than the copy itself takes, blocking is tried, and the cheaper
    of the two is kept; overlapping unless the difference stands out from that between plain steps.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW)
        self._costs: dict[bool, deque[float]] = {True: deque(maxlen=_WINDOW), False: deque(maxlen=_WINDOW)}
        self._copies: deque[float] = deque(maxlen=_WINDOW)
        self._trying_blocking = False
        self.overlap = True
        # How the last one was made: not always as is chosen here (a script's choice, a state that was torn).
        self._overlapped = True

    def plain_step(self, compute_s: float) -> None:
        """A step without a snapshot: seconds from its start to the optimizer."""
        self._plain.append(compute_s)

    def snapshot(self, *, blocked_s: float, compute_s: float, copy_s: float, overlapped: bool) -> float:
        """A step with one: seconds the training thread waited, computed, and the copy's own; returns its cost."""
        usual = statistics.median(self._plain) if self._plain else compute_s
        cost = blocked_s + max(compute_s - usual, 0.0)
        self._costs[overlapped].append(cost)
        self._overlapped = overlapped
        self._copies.append(copy_s)
        self._choose()
        return cost

    @property
    def snapshot_s(self) -> float | None:
        """Seconds that a snapshot costs, made as the last one was; None before the first."""
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
        """By how much the median of a few trials may be off because steps differ anyway: two standard errors.

        The standard error of a median of n normal values is 1.25 sigma/√n; sigma is 1.48 times the median deviation.
        """
        if len(self._plain) < 2:
            return 0.0
        usual = statistics.median(self._plain)
        deviation = 1.48 * statistics.median(abs(step - usual) for step in self._plain)
        return 2 * 1.25 * deviation / math.sqrt(_TRIALS)


@dataclass(frozen=True)
class Cadence:
    """How often.

    Attributes:
        snapshot_steps: steps between snapshots in memory; None makes none but for commits.
        save_steps: steps between commits to storage; None leaves them to the caller and `save_minutes`.
        save_minutes: commit at least so often, in minutes.
        overhead_cap: share of the run's time that `auto` may spend.
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
    """Tells when a snapshot or a commit is due by time. One rank keeps it; the others follow its word.

    What is due by step number needs no clock: see `due_by_step`.
    """

    def __init__(self, cadence: Cadence, now: float, num_failures: int = 0, observed_s: float = 0.0) -> None:
        self._cadence = cadence
        self._began = self._last_snapshot = self._last_commit = now
        self._num_failures, self._observed_s = num_failures, observed_s

    def due_by_step(self, step: int) -> tuple[bool, bool]:
        """Whether a snapshot and a commit are due at this step, where the cadence is a number of steps."""
        snapshot, save = self._cadence.snapshot_steps, self._cadence.save_steps
        return (
            isinstance(snapshot, int) and step % snapshot == 0,
            isinstance(save, int) and step % save == 0,
        )

    def due_by_time(
        self, now: float, snapshot_s: float | None, commit: CommitReport, *, preparing: bool = False
    ) -> tuple[bool, bool]:
        """Whether a snapshot and a commit are due by their measured price. Times are seconds, `now` is monotonic.

        Args:
            preparing: memory for snapshots is being made ready; what goes by price waits until then.
        """
        mtbf = mtbf_s(self._num_failures, self._observed_s + now - self._began)
        cadence = self._cadence
        # The first of each kind is what the price is learnt from.
        snapshot_interval = best_interval_s(snapshot_s, mtbf, cadence.overhead_cap) if snapshot_s is not None else 0.0
        snapshot = cadence.snapshot_steps == "auto" and now - self._last_snapshot >= snapshot_interval
        save = cadence.save_minutes is not None and now - self._last_commit >= 60 * cadence.save_minutes
        if cadence.save_steps == "auto":
            if commit.step < 0 or snapshot_s is None:
                interval = 0.0 if self._last_commit == self._began else _UNKNOWN_COMMIT_S
            else:
                price = snapshot_s + commit.cpu_s
                interval = max(best_interval_s(price, mtbf, cadence.overhead_cap), commit.duration_s)
            save = save or (now - self._last_commit >= interval and not preparing)
        return snapshot and not preparing, save

    def done(self, now: float, *, commit: bool) -> None:
        """A snapshot was made, to be committed or not."""
        self._last_snapshot = now
        if commit:
            self._last_commit = now
