"""A run told from its journal alone: for the end of `runner start`, and for `runner status`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.journal import Event

# Every second of the wall time belongs to exactly one of these, in this order.
CAUSES = [
    "set-up",  # runner start to the first attempt: launcher and agent come up
    "start-up",  # an attempt's start to its first step: imports, data, model, restore
    "training",  # steps that count
    "lost work",  # steps that had to be computed again
    "teardown",  # last step of an attempt to its end: detection, final save
    "between attempts",  # commit of what was snapshotted, backoff
    "down",  # no runner alive
]


@dataclass
class Attempt:
    """One attempt. Times are seconds since the epoch, None where it never came so far."""

    number: int
    began: float
    start_step: int | None = None
    training_began: float | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    ended: float | None = None
    kind: str = "running"
    cause: str = ""


@dataclass
class RunSummary:
    """The fold of a journal."""

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
    skipped_snapshots: int = 0
    failed_commits: int = 0
    last_failed_commit: str = ""
    set_aside: list[str] = field(default_factory=list)
    lost_steps: int = 0
    time_by_cause: dict[str, float] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return sum(self.time_by_cause.values())

    def to_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return {**asdict(self), "wall_s": round(self.wall_s, 3)}


def summarise(events: Sequence[Event], now: float | None = None) -> RunSummary:
    """Fold a journal (oldest event first). `now` closes the account of a run that is still going."""
    run = RunSummary(time_by_cause=dict.fromkeys(CAUSES, 0.0))
    current: Attempt | None = None
    for event in events:
        # What a disk has damaged is passed over.
        with contextlib.suppress(KeyError, TypeError):
            current = _fold(run, current, event)
    _account(run, events, now)
    return run


def _fold(run: RunSummary, current: Attempt | None, event: Event) -> Attempt | None:
    """Take in one event; returns the attempt that runs then."""
    match event["event"]:
        case "run_started":
            run.run_id, run.state, run.reason, run.exit_code = event["run_id"], "starting", "", None
        case "attempt_started":
            current = Attempt(event["attempt"], event["time"])
            run.attempts.append(current)
            run.state = "running"
        case "training_started" if current is not None:
            current.start_step = current.last_step = run.step = event["step"]
            current.training_began = event["time"]
            run.total_steps = event["total_steps"]
        case "log":
            run.step = max(run.step, event["step"])
            run.first_loss = event["loss"] if run.first_loss is None else run.first_loss
            run.last_loss, run.tokens_per_s = event["loss"], event.get("tokens_per_s") or run.tokens_per_s
            if current is not None:
                current.last_step, current.last_step_at = event["step"], event["time"]
        case "committed":
            if event["step"] not in run.committed:
                run.committed.append(event["step"])
            tier = event.get("tier", "local")
            run.newest_by_tier[tier] = max(event["step"], run.newest_by_tier.get(tier, -1))
        case "commit_failed":
            run.failed_commits += 1
            run.last_failed_commit = event["error"]
        case "snapshot_skipped":
            run.skipped_snapshots += 1
        case "checkpoint_set_aside":
            run.set_aside.append(event["kept_as"])
        case "attempt_ended" if current is not None:
            current.ended, current.kind, current.cause = event["time"], event["kind"], event["cause"]
            current.last_step, current.start_step = event["step"], event["start_step"]
            # The heartbeat's times are the ranks' own, finer than those of the messages.
            current.training_began = event["training_began"] or current.training_began
            current.last_step_at = event["last_step_at"] or current.last_step_at
            run.step = event["step"]
        case "stop_requested":
            run.state = "stopping"
        case "run_ended":
            run.state, run.reason, run.exit_code = event["state"], event["reason"], event["exit_code"]
        case _:
            pass
    return current


def _account(run: RunSummary, events: Sequence[Event], now: float | None) -> None:
    """Give every second between the first event and the end to one cause."""
    if not events:
        return
    lives = _lives(events)
    for index, life in enumerate(lives):
        begin, end = life[0]["time"], life[-1]["time"]
        if index + 1 < len(lives):
            run.time_by_cause["down"] += lives[index + 1][0]["time"] - end
        elif now is not None and life[-1]["event"] != "run_ended":
            end = max(end, now)
        attempts = [attempt for attempt in run.attempts if begin <= attempt.began <= end]
        cursor, between = begin, "set-up"
        for attempt in attempts:
            cursor = _spend(run, between, cursor, attempt.began)
            stop = min(attempt.ended or end, end)
            if attempt.training_began is None:
                cursor = _spend(run, "start-up", cursor, stop)
            else:
                cursor = _spend(run, "start-up", cursor, min(attempt.training_began, stop))
                last = max(attempt.last_step_at or cursor, cursor)
                trained = min(last, stop) - cursor
                lost = _lost_steps(run, attempt)
                done = (attempt.last_step or 0) - (attempt.start_step or 0)
                lost_s = trained * lost / done if done > 0 else 0.0
                run.lost_steps += lost
                run.time_by_cause["lost work"] += lost_s
                run.time_by_cause["training"] += trained - lost_s
                cursor = _spend(run, "teardown", cursor + trained, stop)
            between = "between attempts"
        _spend(run, between if attempts else "set-up", cursor, end)
    run.time_by_cause = {cause: round(seconds, 3) for cause, seconds in run.time_by_cause.items()}


def _spend(run: RunSummary, cause: str, begin: float, end: float) -> float:
    run.time_by_cause[cause] += max(end - begin, 0.0)
    return max(begin, end)


def _lost_steps(run: RunSummary, attempt: Attempt) -> int:
    """Steps of an attempt that the next one which trained had to compute again, or will have to."""
    last, start = attempt.last_step or 0, attempt.start_step or 0
    for later in run.attempts[run.attempts.index(attempt) + 1 :]:
        if later.start_step is not None and later.training_began is not None:
            return min(max(last - later.start_step, 0), last - start)
    if run.exit_code is not None and attempt is run.attempts[-1] and attempt.kind not in ("finished", "running"):
        # Nothing but what was committed outlives the run.
        return min(max(last - max(run.committed, default=0), 0), last - start)
    return 0


def _lives(events: Sequence[Event]) -> list[list[Event]]:
    """Events cut at every `run_started`: one list per life of the supervisor."""
    lives: list[list[Event]] = []
    for event in events:
        if event["event"] == "run_started" or not lives:
            lives.append([])
        lives[-1].append(event)
    return lives


def render(run: RunSummary, places: dict[str, str]) -> str:
    """The summary as text."""
    total = f" of {run.total_steps}" if run.total_steps else ""
    restarts = [
        attempt for attempt in run.attempts if attempt.kind not in ("finished", "running", "preempted", "ended at once")
    ]
    lines = [
        f"run {run.run_id}: {run.state}" + (f" - {run.reason}" if run.reason else ""),
        f"  steps        {run.step}{total}",
    ]
    if run.first_loss is not None and run.last_loss is not None:
        lines.append(f"  loss         {run.first_loss:.4f} -> {run.last_loss:.4f}")
    lines.append(f"  attempts     {len(run.attempts)}")
    lines += [
        f"    {attempt.number}: {attempt.kind} at step {attempt.last_step}: {attempt.cause}" for attempt in restarts
    ]
    tiers = ", ".join(f"{step} ({tier})" for tier, step in run.newest_by_tier.items())
    newest = f", newest step {tiers}" if tiers else ""
    lines.append(f"  checkpoints  {len(run.committed)} committed{newest}")
    if run.skipped_snapshots or run.failed_commits:
        why = f", the last one: {run.last_failed_commit}" if run.failed_commits else ""
        lines.append(f"               {run.skipped_snapshots} skipped, {run.failed_commits} failed{why}")
    lines += [f"               set aside: {kept}" for kept in run.set_aside]
    lines.append(f"  lost work    {run.lost_steps} steps, {run.time_by_cause.get('lost work', 0.0):.1f} s")
    wall = run.wall_s
    lines.append(f"  wall time    {wall:.1f} s")
    for cause, seconds in run.time_by_cause.items():
        if seconds > 0:
            lines.append(f"    {cause:<17}{seconds:8.1f} s {100 * seconds / max(wall, 1e-9):5.1f} %")
    lines += [f"  {name:<12} {path}" for name, path in places.items()]
    return "\n".join(lines)
