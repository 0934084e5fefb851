"""`runner status`: the state of a run as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.journal.events import Entry, RunEnded, RunStarted
from runner.journal.ledger import LOST, TRAINING, AttemptAccount
from runner.journal.summary import (
    RunState,
    RunSummary,
    describe_evaluation,
    describe_nodes,
    describe_repetitions,
    describe_slow_ranks,
)
from runner.recovery.restart_state import RunnerProcess, process_namespace
from runner.system.text import duration

_COLOURS = {RunState.FINISHED: "green", RunState.RUNNING: "cyan", RunState.FAILED: "red"}
_COLOURS |= dict.fromkeys((RunState.PREEMPTED, RunState.STOPPING, RunState.WAITING, RunState.BACKOFF), "yellow")
# Why a run whose runner is gone does not run.
GONE = "its runner ended without reporting; the same command continues it"
_BAR_CELLS = 30
# Number of attempts that are shown, the newest ones.
_SHOWN_ATTEMPTS = 8
# Seconds. Runners record events more often, unless steps are very long; a copy of the journal is some seconds behind.
_SILENCE_S = 120.0


def runner_is_gone(entries: Sequence[Entry]) -> bool:
    """Return whether the journal's last runner ran on this node and has ended."""
    last = next((entry.event for entry in reversed(entries) if isinstance(entry.event, RunStarted)), None)
    runner = RunnerProcess.from_dict(last.runner) if last is not None else None
    return last is not None and runner is not None and last.namespace == process_namespace() and runner.is_gone_here


def has_ended(entries: Sequence[Entry]) -> bool:
    """Return whether no runner of the journal's run is running any more, as far as this node knows."""
    ends = (entry.event for entry in reversed(entries) if isinstance(entry.event, RunStarted | RunEnded))
    return isinstance(next(ends, None), RunEnded) or runner_is_gone(entries)


def panel(run: RunSummary, now: float, locations: dict[str, str], *, gone: bool = False) -> RenderableType:
    """Return the run as it stands at a time, in seconds since the epoch.

    Args:
        run: The run.
        now: The time.
        locations: Further lines: a name and a path or URL each.
        gone: Whether its runner has ended without reporting.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    _add_progress(facts, run, now)
    _add_trouble(facts, run)
    lost = f"{run.lost_steps} steps lost, {duration(run.time_by_cause.get(LOST, 0.0))}"
    facts.add_row("goodput", f"{100 * run.goodput:.1f} % of {duration(run.wall_s)}; {lost}")
    if run.pids and not run.state.is_over and not gone:
        # Ranks report in any order.
        pids = sorted(run.pids.items(), key=lambda item: int(item[0].removeprefix("rank ")) if " " in item[0] else -1)
        facts.add_row("processes", ", ".join(f"{name} {pid}" for name, pid in pids))
    for name, location in locations.items():
        facts.add_row(name, Text(location))
    parts: list[RenderableType] = [_title(run, now, gone), facts]
    if run.attempts:
        parts += [Text(), _attempts(run.attempts)]
    if run.wall_s:
        parts += [Text(), _causes(run)]
    return Group(*parts)


def one_line(run: RunSummary, *, gone: bool = False) -> str:
    """Return the run as one line, which changes when something has happened and not as time passes."""
    parts = [state_of(run, gone=gone)]
    parts.append(f"step {run.step}" + (f" of {run.total_steps}" if run.total_steps else ""))
    if run.last_loss is not None:
        parts.append(f"loss {run.last_loss:.4f}")
    if run.best is not None:
        parts.append(f"evaluation {describe_evaluation(run)}")
    parts += [f"committed {step} ({tier})" for tier, step in run.newest_by_tier.items()]
    if run.attempts:
        last = run.attempts[-1]
        parts.append(f"attempt {last.number}")
        if last.failed:
            parts.append(f"{last.kind}: {last.cause}")
    if run.failed_commits:
        parts.append(f"{run.failed_commits} failed saves")
    if run.state.is_over:
        parts.append(run.reason)
    # A cause may have several lines.
    return " · ".join(" ".join(part.split()) for part in parts)


def state_of(run: RunSummary, *, gone: bool) -> str:
    """Return the state of a run in words; `gone` says whether its runner has ended without reporting."""
    return "not running" if gone and not run.state.is_over else run.state.value


def _title(run: RunSummary, now: float, gone: bool) -> Text:
    state, colour, reason = state_of(run, gone=gone), _COLOURS.get(run.state, "white"), run.reason
    if gone and not run.state.is_over:
        colour, reason = "red", GONE
    title = Text.assemble(("run ", "bold"), (run.run_id, "bold"), "  ", (state, f"bold {colour}"))
    if reason:
        title.append(f"  {reason}")
    silence_s = now - run.heard_at if run.heard_at is not None else 0.0
    if silence_s > _SILENCE_S and not run.state.is_over and not gone:
        title.append(f"  nothing heard for {duration(silence_s)}", "yellow")
    return title


def _add_progress(facts: Table, run: RunSummary, now: float) -> None:
    if run.total_steps:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(run.total_steps, min(run.step, run.total_steps), _BAR_CELLS), _steps(run))
        facts.add_row("steps", bar)
    else:
        facts.add_row("steps", str(run.step))
    if run.last_loss is not None:
        facts.add_row("loss", f"{run.first_loss:.4f} → {run.last_loss:.4f}")
    if run.best is not None:
        facts.add_row("evaluation", Text(describe_evaluation(run)))
    if run.tokens_per_s is not None and not run.state.is_over:
        facts.add_row("speed", f"{run.tokens_per_s:,.0f} tokens/s")
    committed = [
        f"step {step} ({tier}), {duration(now - run.newest_at_by_tier.get(tier, now))} ago"
        for tier, step in run.newest_by_tier.items()
    ]
    committed += [f"step {step}, by the program itself" for step in run.program_saves[-1:]]
    facts.add_row("committed", Text("; ".join(committed) or "nothing yet"))


def _add_trouble(facts: Table, run: RunSummary) -> None:
    if run.failed_commits:
        facts.add_row("failed saves", Text(f"{run.failed_commits}, the last one: {run.last_failed_commit}", "yellow"))
    if run.unsaved is not None:
        facts.add_row("unprotected", Text(run.unsaved.describe(), "yellow"))
    for tier, stuck in run.stuck.items():
        text = f"{len(stuck.steps)} checkpoints ({tier}), {stuck.held_bytes / 1e9:,.1f} GB: {stuck.error}"
        facts.add_row("not removed", Text(text, "yellow"))
    for kept in run.quarantined:
        facts.add_row("quarantined", Text(kept))
    if run.malformed_events:
        facts.add_row("journal", Text(f"{run.malformed_events} damaged lines were skipped", "yellow"))
    if run.max_nodes:
        facts.add_row("nodes", Text(describe_nodes(run), "yellow" if len(run.nodes) < run.max_nodes else ""))
    if run.slow is not None and not run.state.is_over:
        facts.add_row("speed", Text(describe_slow_ranks(run.slow), "yellow"))
    if run.resumes or run.repetitions:
        is_equal = not any(one.differs for one in run.repetitions)
        facts.add_row("repeated", Text(describe_repetitions(run), "" if is_equal else "yellow"))
    if run.restarts_left is not None and not run.state.is_over:
        facts.add_row("budget", f"{run.restarts_left} restarts before the next new checkpoint")


def _steps(run: RunSummary) -> str:
    text = f"{run.step} of {run.total_steps}"
    if run.step_s and run.total_steps and run.state is RunState.RUNNING:
        text += f", {duration((run.total_steps - run.step) * run.step_s)} left"
    return text


def _attempts(attempts: list[AttemptAccount]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    have_nodes = any(attempt.nodes for attempt in attempts)
    for name in ("attempt", *(["nodes"] if have_nodes else []), "steps", "ended", "why"):
        table.add_column(name, overflow="fold")
    hidden = len(attempts) - _SHOWN_ATTEMPTS
    if hidden > 0:
        table.add_row("…", f"{hidden} before")
    for attempt in attempts[-_SHOWN_ATTEMPTS:]:
        lost = f", {attempt.lost_steps} lost" if attempt.lost_steps else ""
        nodes = [", ".join(map(str, attempt.nodes))] if have_nodes else []
        table.add_row(str(attempt.number), *nodes, attempt.step_range + lost, Text(attempt.kind), Text(attempt.cause))
    return table


def _causes(run: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("where the time went")
    table.add_column("", justify="right")
    table.add_column("", justify="right")
    table.add_column("")
    for cause, seconds in sorted(run.time_by_cause.items(), key=lambda item: -item[1]):
        if seconds > 0:
            share = seconds / run.wall_s
            bar = Text("█" * math.ceil(share * _BAR_CELLS), "green" if cause == TRAINING else "red")
            table.add_row(cause, duration(seconds), f"{100 * share:.1f} %", bar)
    return table
