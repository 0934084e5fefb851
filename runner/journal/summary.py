"""A run told from its journal alone: for the end of `runner start`, and for `runner status`."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from runner.journal.journal import Event
from runner.journal.ledger import LOST, NO_FAILURE, Attempt, account, attempts_of

_RECENT_LOGS = 20


@dataclass
class RunSummary:
    """The fold of a journal.

    Attributes:
        newest_at_by_tier: when the newest checkpoint of each tier was committed, in seconds since the epoch.
        restarts_left: failures that the budget has room for before a new checkpoint fills it again.
        heard_at: time of the newest event.
        step_s: how long a step takes now, by the last log entries.
    """

    run_id: str = ""
    state: str = "unknown"
    reason: str = ""
    exit_code: int | None = None
    total_steps: int | None = None
    step: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    tokens_per_s: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    newest_by_tier: dict[str, int] = field(default_factory=dict)
    newest_at_by_tier: dict[str, float] = field(default_factory=dict)
    restarts_left: int | None = None
    step_s: float | None = None
    heard_at: float | None = None
    skipped_snapshots: int = 0
    failed_commits: int = 0
    last_failed_commit: str = ""
    set_aside: list[str] = field(default_factory=list)
    lost_steps: int = 0
    time_by_cause: dict[str, float] = field(default_factory=dict)
    goodput: float = 0.0

    @property
    def wall_s(self) -> float:
        return sum(self.time_by_cause.values())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "wall_s": round(self.wall_s, 3)}


def summarise(events: Sequence[Event], now: float | None = None) -> RunSummary:
    """Fold a journal (oldest event first). `now` closes the account of a run that is still going."""
    run = RunSummary(attempts=attempts_of(events))
    for event in events:
        # What a disk has damaged is passed over.
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            _fold(run, event)
    ledger = account(events, now, run.attempts)
    run.time_by_cause, run.goodput = ledger.seconds, round(ledger.goodput, 5)
    run.heard_at = events[-1]["time"] if events else None
    run.restarts_left, run.step_s = _restarts_left(events), _step_s(events)
    run.lost_steps = sum(attempt.lost_steps for attempt in run.attempts)
    return run


def _restarts_left(events: Sequence[Event]) -> int | None:
    """The budget, less the failures since a step was committed that had not been before."""
    budget, failures, newest = None, 0, -1
    for event in events:
        match event["event"]:
            case "run_started":
                budget = event.get("max_restarts")
            case "committed" if isinstance(event.get("step"), int) and event["step"] > newest:
                newest, failures = event["step"], 0
            case "attempt_ended" if event.get("kind") not in NO_FAILURE:
                failures += 1
            case _:
                pass
    return max(budget - failures, 0) if isinstance(budget, int) else None


def _step_s(events: Sequence[Event]) -> float | None:
    """Median over the last log entries of one attempt."""
    logs = [event for event in events if event["event"] == "log" and isinstance(event.get("step"), int)][-_RECENT_LOGS:]
    pairs = [(a, b) for a, b in pairwise(logs) if a.get("attempt") == b.get("attempt") and b["step"] > a["step"]]
    return statistics.median((b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairs) if pairs else None


def _fold(run: RunSummary, event: Event) -> None:
    """Take in one event."""
    match event["event"]:
        case "run_started":
            run.run_id, run.state, run.reason, run.exit_code = str(event["run_id"]), "starting", "", None
        case "waiting_for_nodes":
            run.state = "waiting"
        case "attempt_started":
            run.state = "running"
        case "training_started":
            run.step = int(event["step"])
            run.total_steps = int(event["total_steps"]) if event["total_steps"] is not None else None
        case "log":
            run.step = max(run.step, int(event["step"]))
            run.last_loss = float(event["loss"])
            run.first_loss = run.last_loss if run.first_loss is None else run.first_loss
            run.tokens_per_s = float(event.get("tokens_per_s") or 0.0) or run.tokens_per_s
        case "progress":
            run.step = int(event["step"])
        case "committed":
            step, tier = int(event["step"]), str(event.get("tier", "local"))
            if step not in run.committed:
                run.committed.append(step)
            if step >= run.newest_by_tier.get(tier, -1):
                run.newest_by_tier[tier], run.newest_at_by_tier[tier] = step, event["time"]
        case "commit_failed":
            run.failed_commits += 1
            run.last_failed_commit = str(event["error"])
        case "snapshot_skipped":
            run.skipped_snapshots += 1
        case "checkpoint_set_aside":
            run.set_aside.append(str(event["kept_as"]))
        case "attempt_ended":
            run.step = int(event["step"])
        case "backoff":
            run.state = "backoff"
        case "stop_requested":
            run.state = "stopping"
        case "run_ended":
            run.state, run.reason = str(event["state"]), str(event["reason"])
            run.exit_code = int(event["exit_code"])
        case _:
            pass


def render(run: RunSummary, places: dict[str, str]) -> str:
    """The summary as text."""
    total = f" of {run.total_steps}" if run.total_steps else ""
    restarts = [attempt for attempt in run.attempts if attempt.kind not in NO_FAILURE]
    lines = [
        f"run {run.run_id}: {run.state}",
        f"  steps        {run.step}{total}",
    ]
    if run.first_loss is not None and run.last_loss is not None:
        lines.append(f"  loss         {run.first_loss:.4f} -> {run.last_loss:.4f}")
    lines.append(f"  attempts     {len(run.attempts)}")
    for attempt in restarts:
        # What ended the run is said with its exit code.
        cause = f": {attempt.cause}" if attempt.cause not in run.reason else ""
        lines.append(f"    {attempt.number}: {attempt.kind} at step {attempt.last_step}{cause}")
    tiers = ", ".join(f"{step} ({tier})" for tier, step in run.newest_by_tier.items())
    newest = f", newest step {tiers}" if tiers else ""
    lines.append(f"  checkpoints  {len(run.committed)} committed{newest}")
    if run.skipped_snapshots or run.failed_commits:
        why = f", the last one: {run.last_failed_commit}" if run.failed_commits else ""
        lines.append(f"               {run.skipped_snapshots} skipped, {run.failed_commits} failed{why}")
    lines += [f"               set aside: {kept}" for kept in run.set_aside]
    lines.append(f"  lost work    {run.lost_steps} steps, {run.time_by_cause.get(LOST, 0.0):.1f} s")
    wall = run.wall_s
    lines.append(f"  wall time    {wall:.1f} s, goodput {100 * run.goodput:.1f} %")
    for cause, seconds in run.time_by_cause.items():
        if seconds > 0:
            lines.append(f"    {cause:<22}{seconds:8.1f} s {100 * seconds / max(wall, 1e-9):5.1f} %")
    lines += [f"  {name:<12} {path}" for name, path in places.items()]
    return "\n".join(lines)
