"""A run as its journal describes it: for the end of `runner start`, `runner status` and Prometheus."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from checkpointing.agent.events import (
    CheckpointQuarantined,
    CommitFailedEvent,
    Committed,
    Evaluated,
    Log,
    Pruned,
    PruneFailed,
    Resumed,
    SlowRanks,
    SnapshotSkipped,
    StepsRepeated,
    TrainingStarted,
)
from runner.journal.events import (
    AttemptEnded,
    AttemptStarted,
    Backoff,
    Entry,
    LeaderChanged,
    Malformed,
    NothingSaved,
    ProgramSaved,
    Progress,
    RankStarted,
    RunEnded,
    RunStarted,
    StopRequested,
    WaitingForNodes,
)
from runner.journal.ledger import LOST, AttemptAccount, NodeChange, account, attempts_of, node_changes
from runner.recovery.kinds import is_failure

_RECENT_LOGS = 20


class RunState(Enum):
    """What a run is doing, as a fold over its journal."""

    UNKNOWN = "unknown"
    """The journal has no event."""
    STARTING = "starting"
    """The launcher and the agent are starting."""
    WAITING = "waiting"
    """The leader waits for other nodes."""
    RUNNING = "running"
    """An attempt is running."""
    BACKOFF = "backoff"
    """The runner waits before the next attempt."""
    STOPPING = "stopping"
    """A stop was requested; the ranks take a snapshot and exit."""
    FINISHED = "finished"
    """Training has ended, and its last step is durable."""
    PREEMPTED = "preempted"
    """The run was stopped on request; the same command continues it."""
    FAILED = "failed"
    """The run ended with a failure."""

    @property
    def is_over(self) -> bool:
        """Whether the runner has ended."""
        return self in (RunState.FINISHED, RunState.PREEMPTED, RunState.FAILED)


@dataclass(frozen=True)
class Stuck:
    """Checkpoints that retention could not remove: their steps, their size in bytes, and why the last one stays."""

    steps: list[int]
    held_bytes: int
    error: str


_NOTHING_STUCK = Stuck([], 0, "")


@dataclass(frozen=True)
class BestStep:
    """The step with the best evaluation: its value of the metric by which the trainer chooses, or else of the loss."""

    step: int
    metric: str
    value: float


@dataclass
class RunSummary:
    """The fold of a journal. What is not known yet is empty or None.

    Attributes:
        reason: Why the run ended.
        exit_code: The runner's exit code; None while it runs.
        step: Newest finished step.
        eval_loss: Loss of the newest evaluation that has one.
        best: The step with the best evaluation, of those that count.
        tokens_per_s: Of all ranks, by the newest log entry that has it.
        nodes: Node ranks of the nodes of the newest attempt; empty for a run of one node.
        max_nodes: Nodes that the run may have; 0 for a run of one node, and in old journals.
        leader: Node rank of the node that leads in place of the first one; None if none has had to.
        pids: Process ids of the runner, and of the newest attempt's launcher, agent and ranks on this node, by name.
        slow: Which ranks compute more slowly than the others now; None if there are none.
        resumes: How often training has resumed.
        program_saves: Steps of the checkpoints that a program has saved by itself, in order.
        unsaved: That nothing of the program is saved, and why; None where something is.
        repetitions: How the steps that were recomputed compare, oldest first.
        node_changes: What each change of the nodes has cost, oldest first.
        committed: Committed steps, in the order of their commits.
        newest_at_by_tier: When the newest step of a tier was committed, in seconds since the epoch.
        restarts_left: Failures that the budget allows before a new checkpoint refills it.
        step_s: Seconds that a step takes now, by the newest log entries.
        heard_at: Time of the newest event, in seconds since the epoch.
        skipped_snapshots: Snapshots for which no memory was free.
        stuck: By tier, checkpoints that retention could not remove.
        quarantined: Where invalid checkpoints are kept.
        malformed_events: Lines of the journal that are damaged.
        lost_steps: Steps that had to be recomputed.
        time_by_cause: Seconds by the causes of the ledger.
        goodput: Share of the wall time spent on steps that count, from 0 to 1.
    """

    run_id: str = ""
    state: RunState = RunState.UNKNOWN
    reason: str = ""
    exit_code: int | None = None
    total_steps: int | None = None
    step: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    best: BestStep | None = None
    tokens_per_s: float | None = None
    attempts: list[AttemptAccount] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    max_nodes: int = 0
    leader: int | None = None
    pids: dict[str, int] = field(default_factory=dict)
    slow: SlowRanks | None = None
    resumes: int = 0
    unsaved: NothingSaved | None = None
    program_saves: list[int] = field(default_factory=list)
    repetitions: list[StepsRepeated] = field(default_factory=list)
    node_changes: list[NodeChange] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    newest_by_tier: dict[str, int] = field(default_factory=dict)
    newest_at_by_tier: dict[str, float] = field(default_factory=dict)
    restarts_left: int | None = None
    step_s: float | None = None
    heard_at: float | None = None
    skipped_snapshots: int = 0
    failed_commits: int = 0
    last_failed_commit: str = ""
    stuck: dict[str, Stuck] = field(default_factory=dict)
    quarantined: list[str] = field(default_factory=list)
    malformed_events: int = 0
    lost_steps: int = 0
    time_by_cause: dict[str, float] = field(default_factory=dict)
    goodput: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the last."""
        return sum(self.time_by_cause.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        return {**asdict(self), "state": self.state.value, "wall_s": round(self.wall_s, 3)}


def summarise(entries: Sequence[Entry], now: float | None = None) -> RunSummary:
    """Fold a journal, oldest entry first; `now`, in seconds since the epoch, ends the account of a run that goes on."""
    run = RunSummary(attempts=attempts_of(entries))
    for entry in entries:
        _fold(run, entry)
    ledger = account(entries, now, run.attempts)
    run.time_by_cause, run.goodput = ledger.seconds, round(ledger.goodput, 5)
    # Each tier has its own commit of a step.
    run.committed = list(dict.fromkeys(run.committed))
    run.heard_at = entries[-1].time if entries else None
    run.restarts_left, run.step_s, run.best = _restarts_left(entries), _step_s(entries), best_step(entries)
    run.node_changes = node_changes(run.attempts)
    run.lost_steps = sum(attempt.lost_steps for attempt in run.attempts)
    return run


def evaluations_of(entries: Sequence[Entry]) -> dict[int, dict[str, float]]:
    """Return the metrics of the evaluations that count, by step; those of steps that are to be recomputed do not."""
    found: dict[int, dict[str, float]] = {}
    for entry in entries:
        match entry.event:
            case TrainingStarted() as started:
                found = {step: metrics for step, metrics in found.items() if step <= started.step_of_run}
            case Evaluated() as evaluated:
                # Each of several data sets has an event of its own.
                found.setdefault(evaluated.step_of_run, {}).update(evaluated.metrics)
            case _:
                pass
    return found


def best_step(entries: Sequence[Entry]) -> BestStep | None:
    """Return the first step with the best evaluation, as the Trainer chooses it; None without one."""
    last = next((entry.event for entry in reversed(entries) if isinstance(entry.event, Evaluated)), None)
    if last is None:
        return None
    metric, sign = last.best_by or "eval_loss", -1 if last.best_by and last.higher_is_better else 1
    values = {step: found[metric] for step, found in evaluations_of(entries).items() if metric in found}
    step = min(values, key=lambda step: sign * values[step], default=None)
    return BestStep(step, metric, values[step]) if step is not None else None


def _restarts_left(entries: Sequence[Entry]) -> int | None:
    """Return the budget less the failures since the last newly committed step."""
    budget, failures, newest = None, 0, -1
    for entry in entries:
        match entry.event:
            case RunStarted(max_restarts=max_restarts):
                budget = max_restarts
            case Committed(step=step) if step > newest:
                newest, failures = step, 0
            case AttemptEnded(kind=kind) if is_failure(kind):
                failures += 1
            case _:
                pass
    return max(budget - failures, 0) if budget is not None else None


def _step_s(entries: Sequence[Entry]) -> float | None:
    """Return the median over the newest log entries."""
    logs = [(entry, entry.event) for entry in entries if isinstance(entry.event, Log)][-_RECENT_LOGS:]
    seconds = [
        (later.time - earlier.time) / (second.step - first.step)
        for (earlier, first), (later, second) in pairwise(logs)
        if earlier.attempt == later.attempt and second.step > first.step
    ]
    return statistics.median(seconds) if seconds else None


def _fold(run: RunSummary, entry: Entry) -> None:  # noqa: C901 - A table of events.
    match entry.event:
        case RunStarted(run_id=run_id, pid=pid):
            run.run_id, run.state, run.reason, run.exit_code = run_id, RunState.STARTING, "", None
            run.pids = _pids(runner=pid)
        case WaitingForNodes():
            run.state = RunState.WAITING
        case AttemptStarted() as begun:
            run.state, run.nodes = RunState.RUNNING, begun.nodes
            run.max_nodes = (begun.max_nodes or begun.nnodes) if begun.nodes else 0
            run.slow = None
            run.pids = _pids(runner=run.pids.get("runner"), launcher=begun.launcher_pid, agent=begun.agent_pid)
        case RankStarted(rank=rank, pid=int(pid)):
            run.pids[f"rank {rank}"] = pid
        case SlowRanks() as found:
            run.slow = found if found.ranks else None
        case Resumed():
            run.resumes += 1
        case NothingSaved() as found:
            run.unsaved = found
        case StepsRepeated() as compared:
            run.repetitions.append(compared)
        case LeaderChanged(node=node):
            run.leader = node
        case TrainingStarted() as started:
            run.step, run.total_steps, run.unsaved = started.step, started.total_steps, None
        case Log() as log:
            run.step, run.last_loss = max(run.step, log.step), log.loss
            run.first_loss = run.last_loss if run.first_loss is None else run.first_loss
            run.tokens_per_s = log.metric("tokens_per_s") or run.tokens_per_s
        case Evaluated() as evaluated:
            run.eval_loss = evaluated.metrics.get("eval_loss", run.eval_loss)
        case Progress(step=step):
            run.step = step
        case ProgramSaved(step=step):
            run.unsaved = None
            run.program_saves.append(step)
        case Committed(step=step, tier=tier) as committed:
            run.step = max(run.step, committed.step_of_run)
            run.committed.append(step)
            if step >= run.newest_by_tier.get(tier, -1):
                run.newest_by_tier[tier], run.newest_at_by_tier[tier] = step, entry.time
        case CommitFailedEvent(error=error):
            run.failed_commits += 1
            run.last_failed_commit = error
        case SnapshotSkipped():
            run.skipped_snapshots += 1
        case CheckpointQuarantined(kept_as=kept_as):
            run.quarantined.append(kept_as)
        case PruneFailed(tier=tier, error=error, steps=steps, held_bytes=held_bytes) if steps:
            run.stuck[tier] = Stuck(list(steps), held_bytes, error)
        case Pruned(tier=tier, step=step) if step in run.stuck.get(tier, _NOTHING_STUCK).steps:
            run.stuck.pop(tier)
        case AttemptEnded(step=step):
            run.step = step
        case Backoff():
            run.state = RunState.BACKOFF
        case StopRequested():
            run.state = RunState.STOPPING
        case RunEnded() as end:
            run.state, run.reason, run.exit_code = _ended(end.state), end.reason, end.exit_code
        case Malformed():
            run.malformed_events += 1
        case _:
            pass


def _pids(**pids: int | None) -> dict[str, int]:
    return {name: pid for name, pid in pids.items() if pid}


def _ended(state: str) -> RunState:
    try:
        return RunState(state)
    except ValueError:
        return RunState.UNKNOWN


def describe_nodes(run: RunSummary) -> str:
    """Return which nodes a run of several has, and what changes of them have cost."""
    text = f"{len(run.nodes)} of {run.max_nodes} ({', '.join(map(str, run.nodes))})"
    if run.leader is not None:
        text += f", node {run.leader} leads"
    if run.node_changes:
        pause_s = sum(change.pause_s for change in run.node_changes)
        lost = sum(change.lost_steps for change in run.node_changes)
        text += f"; {len(run.node_changes)} changes paused training for {pause_s:.1f} s and lost {lost} steps"
    return text


def describe_evaluation(run: RunSummary) -> str:
    """Return the newest evaluation's loss and the best step, for a run that has one."""
    assert run.best is not None
    newest = f"loss {run.eval_loss:.4f}; " if run.eval_loss is not None else ""
    return f"{newest}best step {run.best.step}, {run.best.metric} {run.best.value:.4g}"


def describe_slow_ranks(slow: SlowRanks) -> str:
    """Return which ranks are slower than the others, and where they lose the time."""
    if not slow.ranks:
        return "no rank is slower than the others any more"
    found = zip(slow.ranks, slow.nodes, slow.ratios, strict=True)
    ranks = ", ".join(
        f"rank {rank} on node {node}: {ratio:.1f} times"
        + (" (between steps: its data, callbacks)" if rank in slow.between_steps else " (in its forward passes)")
        for rank, node, ratio in found
    )
    return f"slow ranks, by the time that the median rank needs: {ranks}"


def describe_repetitions(run: RunSummary) -> str:
    """Return how what was recomputed compares: the newest difference, or else the newest resume that was compared."""
    found = run.repetitions
    if not found:
        counted = "1 resume" if run.resumes == 1 else f"{run.resumes} resumes"
        return f"{counted}, without a step to compare"
    worst = next((one for one in reversed(found) if one.differs), found[-1])
    equal = sum(not one.differs for one in found)
    return f"{equal} of {len(found)} resumes compared bit for bit; {worst.describe()}"


def _render_losses(run: RunSummary) -> list[str]:
    lines = []
    if run.first_loss is not None and run.last_loss is not None:
        lines.append(f"  loss         {run.first_loss:.4f} -> {run.last_loss:.4f}")
    if run.best is not None:
        lines.append(f"  evaluation   {describe_evaluation(run)}")
    return lines


def render(run: RunSummary, places: dict[str, str]) -> str:
    """Format a summary as text, with a line for each of `places`: a name and a path or URL."""
    total = f" of {run.total_steps}" if run.total_steps else ""
    restarts = [attempt for attempt in run.attempts if attempt.failed]
    lines = [
        f"run {run.run_id}: {run.state.value}",
        f"  steps        {run.step}{total}",
    ]
    lines += _render_losses(run)
    if run.max_nodes:
        lines.append(f"  nodes        {describe_nodes(run)}")
    lines.append(f"  attempts     {len(run.attempts)}")
    for attempt in restarts:
        # The cause that ended the run is printed with its exit code.
        cause = f": {attempt.cause}" if attempt.cause not in run.reason else ""
        lines.append(f"    {attempt.number}: {attempt.kind} at step {attempt.last_step}{cause}")
    tiers = ", ".join(f"{step} ({tier})" for tier, step in run.newest_by_tier.items())
    newest = f", newest step {tiers}" if tiers else ""
    lines.append(f"  checkpoints  {len(run.committed)} committed{newest}")
    if run.skipped_snapshots or run.failed_commits:
        why = f", the last one: {run.last_failed_commit}" if run.failed_commits else ""
        lines.append(f"               {run.skipped_snapshots} skipped, {run.failed_commits} failed{why}")
    lines += [f"               quarantined: {kept}" for kept in run.quarantined]
    if run.program_saves:
        lines.append(
            f"               {len(run.program_saves)} by the program itself, newest step {run.program_saves[-1]}"
        )
    if run.unsaved is not None:
        lines.append(f"               {run.unsaved.describe()}")
    lines.append(f"  lost work    {run.lost_steps} steps, {run.time_by_cause.get(LOST, 0.0):.1f} s")
    if run.resumes or run.repetitions:
        lines.append(f"  repeated     {describe_repetitions(run)}")
    wall = run.wall_s
    lines.append(f"  wall time    {wall:.1f} s, goodput {100 * run.goodput:.1f} %")
    for cause, seconds in run.time_by_cause.items():
        if seconds > 0:
            lines.append(f"    {cause:<22}{seconds:8.1f} s {100 * seconds / max(wall, 1e-9):5.1f} %")
    lines += [f"  {name:<12} {path}" for name, path in places.items()]
    return "\n".join(lines)
