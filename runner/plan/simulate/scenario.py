"""The input of a simulation: durations, and rates of failures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from checkpointing.agent.events import Committed, Log, SnapshotCost, SnapshotTaken, StepEvent
from runner.journal.events import Entry, RunStarted
from runner.journal.ledger import NOT_RUNNING, AttemptAccount, account, attempts_of
from runner.recovery.kinds import FailureKind

HOUR_S = 3600.0
# Mean time between failures of one GPU in Meta's clusters: 1,024 of them fail every 7.9 h (arXiv 2410.21680).
GPU_MTTF_S = 1024 * 7.9 * HOUR_S
_POSITIVE = ("work_s", "snapshot_interval_s", "commit_interval_s")
_COUNTS = {"nodes": 1, "min_nodes": 1, "spares": 0}


@dataclass(frozen=True)
class Scenario:
    """Durations and failure rates of a run. All times are in seconds."""

    work_s: float  # Steps, without any overhead.
    mttf_s: float  # Mean time between unexpected failures of the whole run while it is running; inf for none.
    reclaim_s: float = float("inf")  # Mean time between announced reclaims of spot nodes; inf for none.
    hang_share: float = 0.1  # Share of the failures that are hangs.
    node_loss_share: float = 0.5  # Share of the failures that lose a node, with the snapshots in its memory.
    detection_s: float = 1.0  # From the last finished step to the end of a failed attempt.
    hang_detection_s: float = 60.0  # The same for a hang.
    # Wait before the second restart without a new checkpoint; it doubles with each further one.
    backoff_initial_s: float = 1.0
    backoff_max_s: float = 60.0  # Longest such wait.
    backoff_jitter_s: float = 1.0  # Random addition to it.
    restart_s: float = 30.0  # From the end of the wait until the ranks can restore: processes, rendezvous, model, data.
    first_start_s: float = 60.0  # The same at the first start and on a new node, with cold caches.
    restore_memory_s: float = 5.0  # Restoring a snapshot.
    restore_storage_s: float = 60.0  # Restoring a checkpoint.
    node_wait_s: float = 300.0  # Until a lost node is replaced.
    stop_s: float = 10.0  # From a notice to the committed last step.
    first_snapshot_s: float = 1.0  # Time in steps before the first snapshot of an attempt, which measures their cost.
    snapshot_interval_s: float = 60.0  # Time in steps between snapshots.
    snapshot_s: float = 1.0  # From the end of a step until its snapshot is complete.
    snapshot_stall_s: float = 0.01  # How long training waits for a snapshot.
    commit_interval_s: float = 600.0  # Time in steps between checkpoints, which fall on its multiples.
    commit_s: float = 30.0  # From a complete snapshot until it is durable.
    overhead_share: float = 0.0  # Share of the time in steps that is not training: evaluation, waits for data.
    # Nodes that the run may have. With one, a lost node takes all snapshots with it; with several, the others
    # keep them.
    nodes: float = 1
    min_nodes: float = 1  # With fewer nodes the run waits; with more it continues, proportionally slower.
    spares: float = 0  # Further nodes that are ready to take the place of a lost one.
    grow_interval_s: float = 300.0  # From one change of the nodes to the admission of nodes that have come.

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is out of range."""
        for name, value in vars(self).items():
            possible = value >= 0
            if name in ("mttf_s", "reclaim_s"):
                possible = value > 0
            elif name.endswith("_share"):
                possible = 0 <= value < 1 if name == "overhead_share" else 0 <= value <= 1
            elif name in _POSITIVE:
                possible = 0 < value < math.inf
            elif name in _COUNTS:
                possible = _COUNTS[name] <= value < math.inf and value == int(value)
            # Only the means are infinite: without failures, without reclaims.
            if not possible or (math.isinf(value) and name not in ("mttf_s", "reclaim_s")):
                raise ValueError(f"{name}={value} is out of range")
        if self.hang_share + self.node_loss_share > 1:
            raise ValueError("hang_share + node_loss_share is above 1")
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes={self.min_nodes:g} is above nodes={self.nodes:g}")

    def with_(self, **changes: float) -> Scenario:
        """Return the scenario with other values."""
        return replace(self, **changes)


def learn(entries: Sequence[Entry], scenario: Scenario) -> Scenario:
    """Return the scenario with what durations the run's journal shows."""
    attempts = attempts_of(entries)
    ledger = account(entries, attempts=attempts)
    trained = [attempt for attempt in attempts if attempt.training_began is not None]
    begins = [entry.time for entry in entries if isinstance(entry.event, RunStarted)]
    failed = [a for a in trained if a.failed and a.ended is not None and a.last_step_at is not None]
    changes = {**_first_start(attempts, begins), **_detections(failed), **_restarts(attempts, begins, failed)}
    stalls = _plausible(e.event.blocked_s for e in entries if isinstance(e.event, SnapshotCost))
    commits = _plausible(e.event.duration_s for e in entries if isinstance(e.event, Committed))
    if stalls:
        changes["snapshot_stall_s"] = statistics.mean(stalls)
    if commits:
        changes["commit_s"] = statistics.mean(commits)
    in_steps = sum((a.last_step_at or 0.0) - (a.training_began or 0.0) for a in trained if a.last_step_at)
    waits = ledger.seconds["data wait"] + ledger.seconds["evaluation"]
    if in_steps > 0:
        changes["overhead_share"] = min(waits / in_steps, 0.99)
        changes.update(_cadence(entries, trained, in_steps))
    if ledger.seconds[NOT_RUNNING] > 0:
        changes["node_wait_s"] = ledger.seconds[NOT_RUNNING] / max(len(begins) - 1, 1)
    return scenario.with_(**changes)


def _first_start(attempts: Sequence[AttemptAccount], begins: Sequence[float]) -> dict[str, float]:
    """Return how long the first attempt of a session starts: only such a one has cold caches."""
    for begin in begins:
        first = next((attempt for attempt in attempts if attempt.began >= begin), None)
        if first is not None and first.training_began is not None:
            return {"first_start_s": _before_training(first.training_began, begin, first.restore_s)}
    return {}


def _detections(failed: Sequence[AttemptAccount]) -> dict[str, float]:
    """Return how long it takes to find a failure, and a hang."""
    changes = {}
    hung = FailureKind.HUNG.value
    for name, group in (
        ("detection_s", [a for a in failed if a.kind != hung]),
        ("hang_detection_s", [a for a in failed if a.kind == hung]),
    ):
        if group:
            changes[name] = statistics.mean(max((a.ended or 0.0) - (a.last_step_at or 0.0), 0.0) for a in group)
    return changes


def _restarts(
    attempts: Sequence[AttemptAccount], begins: Sequence[float], failed: Sequence[AttemptAccount]
) -> dict[str, float]:
    """Return how long a restart within a session takes, and reading the snapshot in it."""
    restarts, restores = [], []
    for before, after in pairwise(attempts):
        if any(before.began < begin <= after.began for begin in begins):
            continue
        if before in failed and after.training_began is not None and before.ended is not None:
            since = before.ended + before.backoff_s
            restarts.append(_before_training(after.training_began, since, after.restore_s))
            restores.append(after.restore_s)
    if not restarts:
        return {}
    return {"restart_s": statistics.mean(restarts), "restore_memory_s": statistics.mean(restores)}


def _cadence(entries: Sequence[Entry], trained: Sequence[AttemptAccount], in_steps: float) -> dict[str, float]:
    """Return when an attempt takes its first snapshot, and how often it takes one, and commits one."""
    changes: dict[str, float] = {}
    taken, saved, logged = (_times(entries, kind) for kind in (SnapshotTaken, Committed, Log))
    # Such snapshots are only committed because their attempt ended.
    unplanned = _times(
        [e for e in entries if isinstance(e.event, SnapshotTaken) and not e.event.to_be_committed], SnapshotTaken
    )
    first: dict[int, tuple[int, int]] = {}
    for key in sorted(taken):
        first.setdefault(key[0], key)
    begins = {attempt.number: attempt.training_began for attempt in trained}
    early = [taken[key] - begin for n, key in first.items() if (begin := begins.get(n)) is not None]
    if early:
        changes["first_snapshot_s"] = max(statistics.median(early), 0.0)
    # A logged step gives the time between its end and its snapshot.
    copies = [at - logged[key] for key, at in taken.items() if key in logged] or _plausible(
        e.event.copy_s for e in entries if isinstance(e.event, SnapshotCost)
    )
    if copies:
        changes["snapshot_s"] = max(statistics.median(copies), 0.0)
    for name, times in (
        ("snapshot_interval_s", {key: at for key, at in taken.items() if key != first[key[0]]}),
        ("commit_interval_s", {key: at for key, at in taken.items() if key in saved and key not in unplanned}),
    ):
        pairs = [(one, next_) for one, next_ in pairwise(sorted(times)) if one[0] == next_[0]]
        between = [times[next_] - times[one] for one, next_ in pairs if times[next_] > times[one]]
        if between:
            changes[name] = statistics.median(between)
        elif times:
            changes[name] = in_steps / len(times)
    return changes


def _times(entries: Sequence[Entry], kind: type[StepEvent]) -> dict[tuple[int, int], float]:
    """Return when an event happened first, by attempt and step."""
    times: dict[tuple[int, int], float] = {}
    for entry in entries:
        if isinstance(entry.event, kind):
            times.setdefault((entry.attempt, entry.event.step), entry.time)
    return times


def _before_training(training_began: float | None, since: float, restore_s: float) -> float:
    return max((training_began or since) - since - restore_s, 0.0)


def _plausible(seconds: Iterable[float | None]) -> list[float]:
    return [value for value in seconds if value is not None and 0 <= value < 1e9]
