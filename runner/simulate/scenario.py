"""A run as the simulation knows it: how long what takes, and how often what fails."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from runner.journal.journal import Event
from runner.journal.ledger import NO_FAILURE, WAITING, Attempt, account, attempts_of

HOUR_S = 3600.0
# Of one GPU of Meta's clusters: 1,024 of them fail every 7.9 h (arXiv 2410.21680).
GPU_MTTF_S = 1024 * 7.9 * HOUR_S
_POSITIVE = ("work_s", "snapshot_interval_s", "commit_interval_s")


@dataclass(frozen=True)
class Scenario:
    """All times in seconds.

    Attributes:
        work_s: of steps, were nothing ever in their way.
        mttf_s: mean time between unexpected failures of the whole run, while it has its machines; inf: none.
        reclaim_s: mean time between announced reclaims of spot machines; inf: none.
        hang_share: of the failures, those that are silent.
        machine_share: those that take a machine along, and what is in its memory.
        detection_s, hang_detection_s: from the last finished step to the end of the attempt.
        backoff_initial_s, backoff_max_s, backoff_jitter_s: as in `restart.`: the wait before the second restart without
            a new checkpoint, which doubles with each further one.
        restart_s: from there to the ranks' being ready to restore: processes, rendezvous, model, data.
        first_start_s: the same at the very start, and on a new machine, where nothing is warm.
        restore_memory_s, restore_storage_s: to be back at a snapshot, or at a checkpoint.
        machine_wait_s: until there is another machine.
        stop_s: from a notice to the committed end.
        first_snapshot_s: seconds in steps before an attempt's first snapshot, from which their price is learnt.
        snapshot_interval_s, snapshot_s, snapshot_stall_s: seconds in steps between snapshots in memory, from a step's
            end until one is whole, and for which training waits.
        commit_interval_s, commit_s: seconds in steps between checkpoints, which fall on multiples of it, and from such
            a snapshot until it is durable.
        overhead_share: of the time in steps, what is no training: evaluation, waits for data.
    """

    work_s: float
    mttf_s: float
    reclaim_s: float = float("inf")
    hang_share: float = 0.1
    machine_share: float = 0.5
    detection_s: float = 1.0
    hang_detection_s: float = 60.0
    backoff_initial_s: float = 1.0
    backoff_max_s: float = 60.0
    backoff_jitter_s: float = 1.0
    restart_s: float = 30.0
    first_start_s: float = 60.0
    restore_memory_s: float = 5.0
    restore_storage_s: float = 60.0
    machine_wait_s: float = 300.0
    stop_s: float = 10.0
    first_snapshot_s: float = 1.0
    snapshot_interval_s: float = 60.0
    snapshot_s: float = 1.0
    snapshot_stall_s: float = 0.01
    commit_interval_s: float = 600.0
    commit_s: float = 30.0
    overhead_share: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            possible = value >= 0
            if name in ("mttf_s", "reclaim_s"):
                possible = value > 0
            elif name.endswith("_share"):
                possible = 0 <= value < 1 if name == "overhead_share" else 0 <= value <= 1
            elif name in _POSITIVE:
                possible = 0 < value < math.inf
            # Without failures and reclaims their means are infinite; nothing else can be.
            if not possible or (math.isinf(value) and name not in ("mttf_s", "reclaim_s")):
                raise ValueError(f"{name}={value} is not possible")
        if self.hang_share + self.machine_share > 1:
            raise ValueError("hang_share and machine_share are more than all failures")

    def with_(self, **changes: float) -> Scenario:
        return replace(self, **changes)


def learn(events: Sequence[Event], scenario: Scenario) -> Scenario:
    """What a run's journal tells of how long things take; what it does not tell stays as it is."""
    attempts = attempts_of(events)
    ledger = account(events, attempts=attempts)
    changes: dict[str, float] = {}
    trained = [attempt for attempt in attempts if attempt.training_began is not None]
    begins = [event["time"] for event in events if event["event"] == "run_started"]
    for begin in begins:
        first = next((attempt for attempt in attempts if attempt.began >= begin), None)
        # What follows a failed one is warm.
        if first is not None and first.training_began is not None:
            changes["first_start_s"] = _before_training(first.training_began, begin, first.restore_s)
            break
    failed = [a for a in trained if a.kind not in NO_FAILURE and a.ended is not None and a.last_step_at is not None]
    for name, group in (
        ("detection_s", [a for a in failed if a.kind != "hung"]),
        ("hang_detection_s", [a for a in failed if a.kind == "hung"]),
    ):
        if group:
            changes[name] = statistics.mean(max((a.ended or 0.0) - (a.last_step_at or 0.0), 0.0) for a in group)
    restarts, restores = [], []
    for before, after in pairwise(attempts):
        if any(before.began < begin <= after.began for begin in begins):
            continue
        if before in failed and after.training_began is not None and before.ended is not None:
            since = before.ended + before.backoff_s
            restarts.append(_before_training(after.training_began, since, after.restore_s))
            restores.append(after.restore_s)
    if restarts:
        changes["restart_s"], changes["restore_memory_s"] = statistics.mean(restarts), statistics.mean(restores)
    stalls, commits = _told(events, "snapshot_cost", "blocked_s"), _told(events, "committed", "duration_s")
    if stalls:
        changes["snapshot_stall_s"] = statistics.mean(stalls)
    if commits:
        changes["commit_s"] = statistics.mean(commits)
    in_steps = sum((a.last_step_at or 0.0) - (a.training_began or 0.0) for a in trained if a.last_step_at)
    waits = ledger.seconds["data wait"] + ledger.seconds["evaluation"]
    if in_steps > 0:
        changes["overhead_share"] = min(waits / in_steps, 0.99)
        changes.update(_cadence(events, trained, in_steps))
    if ledger.seconds[WAITING] > 0:
        changes["machine_wait_s"] = ledger.seconds[WAITING] / max(len(begins) - 1, 1)
    return scenario.with_(**changes)


def _cadence(events: Sequence[Event], trained: Sequence[Attempt], in_steps: float) -> dict[str, float]:
    """When an attempt makes its first snapshot, and how often it makes one, and commits one."""
    changes: dict[str, float] = {}
    taken, saved, logged = (_times(events, name) for name in ("snapshot", "committed", "log"))
    # Committed, if at all, because its attempt has ended.
    unplanned = _times([event for event in events if event.get("to_be_committed") is False], "snapshot")
    first: dict[int, tuple[int, int]] = {}
    for key in sorted(taken):
        first.setdefault(key[0], key)
    begins = {attempt.number: attempt.training_began for attempt in trained}
    early = [taken[key] - begin for n, key in first.items() if (begin := begins.get(n)) is not None]
    if early:
        changes["first_snapshot_s"] = max(statistics.median(early), 0.0)
    # Where a step is in the log, too.
    copies = [at - logged[key] for key, at in taken.items() if key in logged] or _told(
        events, "snapshot_cost", "copy_s"
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


def _times(events: Sequence[Event], name: str) -> dict[tuple[int, int], float]:
    """When this happened first, by attempt and step. What a disk has damaged is passed over."""
    times: dict[tuple[int, int], float] = {}
    for event in events:
        attempt, step = event.get("attempt"), event.get("step")
        if event["event"] == name and isinstance(attempt, int) and isinstance(step, int):
            times.setdefault((attempt, step), event["time"])
    return times


def _before_training(training_began: float | None, since: float, restore_s: float) -> float:
    return max((training_began or since) - since - restore_s, 0.0)


def _told(events: Sequence[Event], name: str, key: str) -> list[float]:
    """What a disk has damaged is passed over."""
    values = (event.get(key) for event in events if event["event"] == name)
    return [float(value) for value in values if isinstance(value, (int, float)) and 0 <= value < 1e9]
