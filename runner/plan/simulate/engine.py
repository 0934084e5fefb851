"""A discrete-event simulation of runs under failures, from one interruption to the next."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from runner.journal.ledger import LOST, MISSING, NOT_RUNNING, TRAINING
from runner.plan.simulate.scenario import Scenario
from runner.recovery.policy import backoff_s

# A run counts as never ending when it has taken this many times its work.
_HOPELESS = 100.0
_MAX_INTERRUPTIONS = 200_000


@dataclass
class Outcome:
    """One simulated run: seconds by cause, named as in the ledger, and the number of failures and reclaims."""

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
    """Statistics of many simulated runs."""

    goodput: float  # Mean goodput.
    low: float  # Lower end of its 95 % confidence interval.
    high: float  # Upper end of its 95 % confidence interval.
    percentile_5: float  # 5th percentile of the goodput of single runs.
    percentile_95: float  # 95th percentile of the goodput of single runs.
    wall_s: float  # Mean wall time in seconds.
    seconds: dict[str, float]  # Mean seconds by cause.
    interruptions: float  # Mean number of interruptions.
    finished: float  # Share of the runs that ended.


def forecast(scenario: Scenario, runs: int = 200, seed: int = 0, trace_s: Sequence[float] | None = None) -> Forecast:
    """Simulate many runs.

    With `trace_s`, these are the seconds between failures in their order, instead of an exponential distribution. Each
    run begins at a random entry and repeats the trace.
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

    With `gaps`, these are the seconds between failures, instead of an exponential distribution.
    """
    return _Run(scenario, source, gaps).to_its_end()


class _Run:
    """One simulated run, from one interruption to the next."""

    def __init__(self, scenario: Scenario, source: random.Random, gaps: Iterator[float] | None) -> None:
        self._it, self._source, self._gaps = scenario, source, gaps
        self._out, self._done, self._nodes = Outcome(), _Work(), Nodes(scenario)
        # Seconds of work that the next attempt resumes from.
        self._base = 0.0
        self._start_s, self._restore_s = scenario.first_start_s, 0.0
        self._failure_in, self._reclaim_in = self._draw_failure(), _exponential(source, scenario.reclaim_s)
        # Failures since the last new checkpoint.
        self._failures = 0

    def to_its_end(self) -> Outcome:
        """Run until the work is done, or that is hopeless."""
        it, out = self._it, self._out
        while True:
            hopeless = out.wall_s > _HOPELESS * (it.work_s + it.first_start_s)
            if hopeless or out.interruptions > _MAX_INTERRUPTIONS:
                out.finished = False
                break
            if self._attempt():
                break
        self._done.account(it, out)
        return out

    def _attempt(self) -> bool:
        """Run until something interrupts training; returns whether the work is done."""
        it, out, nodes = self._it, self._out, self._nodes
        share, starts_s = nodes.share, self._start_s + self._restore_s
        # Fewer nodes fail, and are reclaimed, less often; a trace is of the run as it was.
        failing = share if self._gaps is None else 1.0
        fails_at, reclaimed_at = self._failure_in / failing, self._reclaim_in / share
        # No attempt is paused before it trains.
        until = min(fails_at, reclaimed_at, max(nodes.growth_in, starts_s))
        steps_s, wanted_s = until - starts_s, (it.work_s - self._base) / (_speed(it) * share)
        _spend_start(out, min(until, starts_s), self._start_s)
        if steps_s >= wanted_s:
            self._train(it.work_s, wanted_s, share)
            return True
        steps_s = max(steps_s, 0.0)
        reached, held, kept = _progress(it, self._base, steps_s, share)
        before = self._base
        self._train(reached, steps_s, share)
        nodes.elapse(until)
        self._failure_in, self._reclaim_in = (fails_at - until) * failing, (reclaimed_at - until) * share
        if until < fails_at and until < reclaimed_at:
            self._grow(reached)
        else:
            out.interruptions += 1
            self._failures, kind = (1 if kept > before else self._failures + 1), self._source.random()
            if until < reclaimed_at:
                self._failed(held, kept, kind)
            else:
                self._reclaimed(reached)
        out.spend(LOST, self._done.fall_back(self._base))
        return False

    def _grow(self, reached: float) -> None:
        """Admit nodes that have come, at a step boundary."""
        self._stop(reached)
        self._nodes.grow()
        self._start_s, self._restore_s = self._it.restart_s, self._it.restore_memory_s

    def _reclaimed(self, reached: float) -> None:
        """Lose a node that was announced to leave, so that the current step is committed."""
        self._stop(reached)
        self._failures = 0
        self._lose_node()
        self._reclaim_in = _exponential(self._source, self._it.reclaim_s)

    def _failed(self, held: float, kept: float, kind: float) -> None:
        it = self._it
        if kind < it.node_loss_share:
            # The other nodes hold the newest snapshot.
            self._base = held if it.nodes > 1 else kept
            self._spend("detection", it.detection_s)
            if self._nodes.active + self._nodes.spares <= it.min_nodes:
                self._back_off()
            self._lose_node()
        else:
            hung = kind < it.node_loss_share + it.hang_share
            self._spend(*(("hang wait", it.hang_detection_s) if hung else ("detection", it.detection_s)))
            self._back_off()
            # The agent survives, and commits its newest snapshot.
            self._failures = 0 if held > kept else self._failures
            self._base = held
            self._start_s, self._restore_s = it.restart_s, it.restore_memory_s
        self._failure_in = self._draw_failure()

    def _back_off(self) -> None:
        initial_s, max_s, jitter_s = self._it.backoff_initial_s, self._it.backoff_max_s, self._it.backoff_jitter_s
        wait_s = backoff_s(self._failures, initial_s=initial_s, max_s=max_s, jitter_s=jitter_s, source=self._source)
        self._spend("backoff", wait_s)

    def _lose_node(self) -> None:
        """Continue with a spare or with fewer nodes; otherwise wait for the replacement."""
        it, waited_s = self._it, self._nodes.lose()
        self._out.spend(NOT_RUNNING, waited_s)
        # The processes of a replacement start with cold caches; a spare's are up.
        self._start_s = it.first_start_s if waited_s or it.nodes == 1 else it.restart_s
        self._restore_s = it.restore_storage_s if it.nodes == 1 else it.restore_memory_s

    def _stop(self, reached: float) -> None:
        self._base = reached
        self._spend("teardown", self._it.stop_s)

    def _train(self, reached: float, seconds: float, share: float) -> None:
        self._done.add(self._base, reached, seconds * share)
        if share < 1:
            self._out.spend(MISSING, seconds * (1 - share))

    def _spend(self, cause: str, seconds: float) -> None:
        self._out.spend(cause, seconds)
        self._nodes.elapse(seconds)

    def _draw_failure(self) -> float:
        return next(self._gaps) if self._gaps is not None else _exponential(self._source, self._it.mttf_s)


class Nodes:
    """Which nodes a run has, as time passes and nodes are lost: active ones that train, or would, and spares."""

    def __init__(self, scenario: Scenario) -> None:
        """Begin with all nodes and all spares."""
        self._it = scenario
        self.active, self.spares = int(scenario.nodes), int(scenario.spares)
        # Seconds until each replacement is there, the next one first.
        self._coming: list[float] = []
        self._since_change_s = math.inf

    @property
    def share(self) -> float:
        """Active nodes, as a share of those that the run may have."""
        return self.active / self._it.nodes

    @property
    def growth_in(self) -> float:
        """Seconds until a node can be admitted; inf if none is missing."""
        if self.active == self._it.nodes or not (self.spares or self._coming):
            return math.inf
        there_in = 0.0 if self.spares else self._coming[0]
        return max(there_in, self._it.grow_interval_s - self._since_change_s, 0.0)

    def elapse(self, seconds: float) -> None:
        """Let time pass; replacements that arrive are spares until they are admitted."""
        self._since_change_s += seconds
        self._coming = [left - seconds for left in self._coming]
        while self._coming and self._coming[0] <= 1e-9:
            self._coming.pop(0)
            self.spares += 1

    def lose(self) -> float:
        """Lose a node, which is replaced; return the seconds until the run has as many nodes as it needs."""
        # All take as long, so the newest one comes last.
        self._coming.append(self._it.node_wait_s)
        self.active -= 1
        self._admit()
        waited_s = 0.0
        while self.active < self._it.min_nodes:
            step_s = self._coming[0]
            waited_s += step_s
            self.elapse(step_s)
            self._admit()
        self._since_change_s = 0.0
        return waited_s

    def grow(self) -> None:
        """Admit the nodes that have come."""
        self._admit()
        self._since_change_s = 0.0

    def _admit(self) -> None:
        came = min(self.spares, int(self._it.nodes) - self.active)
        self.active, self.spares = self.active + came, self.spares - came


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


def _progress(it: Scenario, base: float, steps_s: float, share: float) -> tuple[float, float, float]:
    """Return the work after this many seconds in steps: reached, in the newest snapshot, in the newest checkpoint."""
    speed, rate = _speed(it) * share, _rate(it) * share
    reached = base + steps_s * speed
    # Only one checkpoint is written at a time.
    per_commit = max(it.commit_interval_s, it.commit_s) * rate
    per_snapshot = it.snapshot_interval_s * rate
    # A snapshot of a later step cannot be complete yet.
    copied = reached - it.snapshot_s * speed
    saved = copied // per_commit * per_commit
    begun = saved if saved > base else base + it.first_snapshot_s * rate
    held = begun + (copied - begun) // per_snapshot * per_snapshot if copied >= begun else base
    kept = (copied - it.commit_s * speed) // per_commit * per_commit
    return reached, max(held, base), max(kept, base)


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
