"""A discrete-event simulation of runs under failures, from one interruption to the next."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from runner.journal.ledger import LOST, NOT_RUNNING, TRAINING
from runner.recovery.policy import backoff_s
from runner.simulate.scenario import Scenario

# A run counts as never ending when it has taken this many times its work.
_HOPELESS = 100.0
_MAX_INTERRUPTIONS = 200_000


@dataclass
class Outcome:
    """One simulated run.

    Attributes:
        seconds: Seconds by cause, named as in the ledger.
        interruptions: Number of failures and reclaims.
        finished: Whether the run ended.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    interruptions: int = 0
    finished: bool = True

    @property
    def wall_s(self) -> float:
        """Wall time in seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the wall time that is training."""
        return self.seconds.get(TRAINING, 0.0) / self.wall_s if self.wall_s else 0.0

    def spend(self, cause: str, seconds: float) -> None:
        """Add seconds to a cause."""
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


@dataclass(frozen=True)
class Forecast:
    """Statistics of many simulated runs.

    Attributes:
        goodput: Mean goodput.
        low: Lower end of its 95 % confidence interval.
        high: Upper end of its 95 % confidence interval.
        percentile_5: 5th percentile of the goodput of single runs.
        percentile_95: 95th percentile of the goodput of single runs.
        wall_s: Mean wall time in seconds.
        seconds: Mean seconds by cause.
        interruptions: Mean number of interruptions.
        finished: Share of the runs that ended.
    """

    goodput: float
    low: float
    high: float
    percentile_5: float
    percentile_95: float
    wall_s: float
    seconds: dict[str, float]
    interruptions: float
    finished: float


def forecast(scenario: Scenario, runs: int = 200, seed: int = 0, trace_s: Sequence[float] | None = None) -> Forecast:
    """Simulate many runs.

    Args:
        scenario: The run.
        runs: Number of simulated runs.
        seed: Seed of all of them.
        trace_s: Seconds between failures in their order, instead of an exponential distribution. Each run begins at a
            random entry and repeats the trace.
    """
    outcomes = []
    for number in range(runs):
        source = random.Random(f"{seed}-{number}")
        outcomes.append(simulate(scenario, source, _from_trace(trace_s, source) if trace_s else None))
    shares = sorted(outcome.goodput for outcome in outcomes)
    mean = statistics.mean(shares)
    half = 1.96 * statistics.stdev(shares) / math.sqrt(runs) if runs > 1 else 0.0
    causes = {cause for outcome in outcomes for cause in outcome.seconds}
    return Forecast(
        mean,
        mean - half,
        min(mean + half, 1.0),
        shares[int(0.05 * (runs - 1))],
        shares[math.ceil(0.95 * (runs - 1))],
        statistics.mean(outcome.wall_s for outcome in outcomes),
        {cause: statistics.mean(o.seconds.get(cause, 0.0) for o in outcomes) for cause in sorted(causes)},
        statistics.mean(outcome.interruptions for outcome in outcomes),
        statistics.mean(outcome.finished for outcome in outcomes),
    )


def simulate(scenario: Scenario, source: random.Random, gaps: Iterator[float] | None = None) -> Outcome:
    """Simulate one run to its end. Interruptions also occur during start-up and restore.

    Args:
        scenario: The run.
        source: Source of randomness.
        gaps: Seconds between failures, instead of an exponential distribution.
    """
    it, out, done = scenario, Outcome(), _Work()
    draw: Callable[[], float] = gaps.__next__ if gaps is not None else lambda: _exponential(source, it.mttf_s)
    failure_in, reclaim_in = draw(), _exponential(source, it.reclaim_s)
    # Seconds of work that the next attempt resumes from.
    base = 0.0
    start_s, restore_s = it.first_start_s, 0.0
    # Failures since the last new checkpoint.
    failures = 0
    while True:
        hopeless = sum(out.seconds.values()) > _HOPELESS * (it.work_s + it.first_start_s)
        if hopeless or out.interruptions > _MAX_INTERRUPTIONS:
            out.finished = False
            break
        until = min(failure_in, reclaim_in)
        steps_s, wanted_s = until - start_s - restore_s, (it.work_s - base) / _speed(it)
        _spend_start(out, min(until, start_s + restore_s), start_s)
        if steps_s >= wanted_s:
            done.add(base, it.work_s, wanted_s)
            break
        reached, held, kept = _progress(it, base, max(steps_s, 0.0))
        done.add(base, reached, max(steps_s, 0.0))
        out.interruptions += 1
        failures = 1 if kept > base else failures + 1
        reclaimed, kind = reclaim_in <= failure_in, source.random()
        if reclaimed:
            # A reclaim is announced, so the current step is committed.
            base = reached
            out.spend("teardown", it.stop_s)
            failures = 0
        elif kind < it.node_loss_share:
            base = kept
            out.spend("detection", it.detection_s)
            out.spend("backoff", _backoff_s(it, failures, source))
        else:
            hung = kind < it.node_loss_share + it.hang_share
            out.spend(*(("hang wait", it.hang_detection_s) if hung else ("detection", it.detection_s)))
            out.spend("backoff", _backoff_s(it, failures, source))
            # The agent survives, and commits its newest snapshot.
            failures = 0 if held > kept else failures
            base = held
        out.spend(LOST, done.fall_back(base))
        if reclaimed or kind < it.node_loss_share:
            out.spend(NOT_RUNNING, it.node_wait_s)
            start_s, restore_s = it.first_start_s, it.restore_storage_s
        else:
            start_s, restore_s = it.restart_s, it.restore_memory_s
        failure_in = failure_in - until if reclaimed else draw()
        reclaim_in = _exponential(source, it.reclaim_s) if reclaimed else reclaim_in - until
    done.account(it, out)
    return out


class _Work:
    """Work that counts so far, as adjacent stretches."""

    def __init__(self) -> None:
        self._stretches: list[tuple[float, float, float]] = []

    def add(self, begin: float, end: float, seconds: float) -> None:
        """Add work from `begin` to `end`, which took this many seconds of the run."""
        if seconds > 0:
            self._stretches.append((begin, end, seconds))

    def fall_back(self, to: float) -> float:
        """Discard all work beyond a point; return the seconds that it took."""
        lost_s = 0.0
        while self._stretches and (self._stretches[-1][1] > to or self._stretches[-1][0] >= to):
            begin, end, seconds = self._stretches.pop()
            kept = max(to - begin, 0.0) / (end - begin) if end > begin else 0.0
            lost_s += seconds * (1 - kept)
            if kept > 0:
                self._stretches.append((begin, to, seconds * kept))
                break
        return lost_s

    def account(self, it: Scenario, out: Outcome) -> None:
        """Add the time in steps to its causes."""
        work_s = sum(end - begin for begin, end, _ in self._stretches)
        rest_s = max(sum(seconds for *_, seconds in self._stretches) - work_s, 0.0)
        waits_s = min(work_s * it.overhead_share / (1 - it.overhead_share), rest_s)
        for cause, seconds in ((TRAINING, work_s), ("data wait", waits_s), ("checkpoint stall", rest_s - waits_s)):
            out.spend(cause, seconds)


def _progress(it: Scenario, base: float, steps_s: float) -> tuple[float, float, float]:
    """Return the work after this many seconds in steps: reached, in the newest snapshot, in the newest checkpoint."""
    speed = _speed(it)
    reached = base + steps_s * speed
    # Only one checkpoint is written at a time.
    per_commit = max(it.commit_interval_s, it.commit_s) * _rate(it)
    per_snapshot = it.snapshot_interval_s * _rate(it)
    # A snapshot of a later step cannot be complete yet.
    copied = reached - it.snapshot_s * speed
    saved = copied // per_commit * per_commit
    begun = saved if saved > base else base + it.first_snapshot_s * _rate(it)
    held = begun + (copied - begun) // per_snapshot * per_snapshot if copied >= begun else base
    kept = (copied - it.commit_s * speed) // per_commit * per_commit
    return reached, max(held, base), max(kept, base)


def _backoff_s(it: Scenario, failures: int, source: random.Random) -> float:
    return backoff_s(
        failures,
        initial_s=it.backoff_initial_s,
        max_s=it.backoff_max_s,
        jitter_s=it.backoff_jitter_s,
        source=source,
    )


def _rate(it: Scenario) -> float:
    """Return the seconds of work per second in steps, without snapshots."""
    return 1 - it.overhead_share


def _speed(it: Scenario) -> float:
    """Return the seconds of work per second in steps, with snapshots; every commit needs one."""
    interval_s = min(it.snapshot_interval_s, it.commit_interval_s)
    return _rate(it) * interval_s / (interval_s + it.snapshot_stall_s)


def _spend_start(out: Outcome, seconds: float, start_s: float) -> None:
    out.spend("start-up", min(seconds, start_s))
    out.spend("restore", max(seconds - start_s, 0.0))


def _exponential(source: random.Random, mean: float) -> float:
    return source.expovariate(1 / mean) if math.isfinite(mean) else math.inf


def _from_trace(trace_s: Sequence[float], source: random.Random) -> Iterator[float]:
    number = source.randrange(len(trace_s))
    while True:
        yield trace_s[number % len(trace_s)]
        number += 1
