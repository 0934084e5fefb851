"""Where every second of a run went: a fold over its journal.

Each second between the first event and the last belongs to exactly one cause. Goodput is the share of them that went
into steps that count: ETTR, the effective training time ratio of "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters" (arXiv 2410.21680), with the time between two sessions of the run in the denominator. It
counts node-seconds: a second in which steps are taken on 3 of 4 nodes is 0.75 s of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from checkpointing.agent.events import Committed, Evaluated, Log, Restored, SnapshotCost, TrainingStarted
from runner.journal.events import (
    AttemptEnded,
    AttemptStarted,
    Backoff,
    Entry,
    Progress,
    RankStarted,
    RunEnded,
    RunStarted,
)
from runner.recovery.kinds import FailureKind, is_failure

# How attempts end, besides the kinds of failures: one that has not ended, and one whose end no runner recorded.
RUNNING, CUT_OFF = "running", "cut off"

TRAINING, LOST, NOT_RUNNING, MISSING = "training", "lost work", "not running", "missing nodes"
# An attempt that is silent for longer may have been killed with its machine.
_SILENCE_S = 60.0
# In the order in which they are shown.
CAUSES = [
    TRAINING,  # steps that count
    "checkpoint stall",  # training waits while a snapshot is taken
    "data wait",  # training waits for a batch
    "evaluation",
    LOST,  # steps that had to be recomputed
    MISSING,  # the share of the steps' time that belongs to nodes which the run may have, and had not
    "detection",  # from the last finished step to the first sign of a failure, with the unfinished step
    "hang wait",  # the same, for a hang
    "teardown",  # to the end of the attempt and of its commits
    "backoff",
    "start-up",  # of the runner's processes and of an attempt: imports, data, model
    "launch",  # from an attempt's begin to its first rank, with the wait for other nodes
    "restore",  # choosing, reading and loading a checkpoint or snapshot
    NOT_RUNNING,  # no runner: preempted, killed, or not started again yet
]


@dataclass
class AttemptAccount:
    """One attempt. Times are seconds since the epoch, None for what it did not reach.

    Attributes:
        heard_at: When it reported something last.
        nodes: Node ranks of its nodes; empty for a run of one node, and in old journals.
        share: Its share of the nodes that the run may have, from 0 to 1.
        ranks_began: When its first rank reported.
        training_began: When its first step began.
        failed_at: First sign that it had failed.
        ended: When all its processes had ended.
        kind: Value of a `FailureKind`, `RUNNING` or `CUT_OFF`.
        cause: Why it ended, for people.
        restore_s: Seconds that rank 0 took to restore.
        stall_s: Seconds that training waited for snapshots.
        data_wait: For each log entry its step, and the seconds per step that training waited for data.
        backoff_s: Seconds of backoff after it.
        lost_steps: Steps that later attempts had to compute again.
    """

    number: int
    began: float
    heard_at: float = 0.0
    ranks_began: float | None = None
    start_step: int | None = None
    training_began: float | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    failed_at: float | None = None
    ended: float | None = None
    kind: str = RUNNING
    cause: str = ""
    restore_s: float = 0.0
    stall_s: float = 0.0
    evaluation_s: float = 0.0
    data_wait: list[tuple[int, float]] = field(default_factory=list)
    backoff_s: float = 0.0
    lost_steps: int = 0
    nodes: list[int] = field(default_factory=list)
    share: float = 1.0

    @property
    def failed(self) -> bool:
        """Whether the attempt ended with a failure, recorded or not."""
        return self.kind != RUNNING and is_failure(self.kind)

    @property
    def steps(self) -> int:
        """Steps that it finished."""
        return (self.last_step or 0) - (self.start_step or 0)

    @property
    def step_range(self) -> str:
        """First and last step, for people."""
        return f"{self.start_step}-{self.last_step}" if self.training_began is not None else "none"

    @property
    def data_wait_s(self) -> float:
        """Seconds that training waited for data, over all logged steps."""
        total, last = 0.0, self.start_step or 0
        for step, seconds in self.data_wait:
            total += max(step - last, 0) * seconds
            last = step
        return total

    def take(self, entry: Entry) -> None:  # noqa: C901 - A table of events.
        """Fold an event of this attempt."""
        self.heard_at = entry.time
        match entry.event:
            case RankStarted():
                self.ranks_began = self.ranks_began or entry.time
            case TrainingStarted(step=step, stage=None):
                self.start_step = self.last_step = step
                self.training_began = entry.time
            case Restored(seconds=seconds):
                self.restore_s += seconds
            case SnapshotCost(blocked_s=seconds):
                self.stall_s += seconds
            case Evaluated() as evaluated:
                self.evaluation_s += evaluated.metric("eval_runtime") or 0.0
            case Log() as log:
                self.last_step, self.last_step_at = log.step_of_run, entry.time
                if (wait_s := log.metric("data_wait_s")) is not None:
                    self.data_wait.append((self.last_step, wait_s))
            case Progress(step=step) if self.training_began is not None and step >= (self.last_step or 0):
                self.last_step, self.last_step_at = step, entry.time
            case AttemptEnded() as end:
                self.ended, self.kind, self.cause = entry.time, end.kind, end.cause
                self.last_step, self.start_step = end.step, end.start_step
                # The ranks' own times, from their heartbeats, are finer than those of the messages.
                self.training_began = end.training_began or self.training_began
                self.last_step_at = end.last_step_at or self.last_step_at
                self.failed_at = end.failed_at or None
            case Backoff(delay_s=seconds):
                self.backoff_s += seconds
            case _:
                pass


@dataclass(frozen=True)
class Span:
    """A stretch of a run's time, in seconds since the epoch; the attempt is 0 outside of all attempts."""

    cause: str
    begin: float
    end: float
    attempt: int


@dataclass
class Ledger:
    """The account of a run's time.

    Attributes:
        seconds: By cause; they sum to the wall time.
        by_attempt: The same for each attempt, by its number, with the time between it and the next one.
        spans: The same seconds as stretches, in order and without gaps; what is spread over an attempt's training
            (stall, data wait, evaluation, lost work) is part of one stretch of TRAINING.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    by_attempt: dict[int, dict[str, float]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the last."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the wall time spent on steps that count, from 0 to 1."""
        return self.seconds[TRAINING] / self.wall_s if self.wall_s else 0.0


def attempts_of(entries: Sequence[Entry]) -> list[AttemptAccount]:
    """Return every attempt of a journal, oldest first, with the steps that each one lost."""
    attempts: list[AttemptAccount] = []
    for entry in entries:
        if isinstance(entry.event, RunStarted) and attempts and attempts[-1].ended is None:
            attempts[-1].kind, attempts[-1].cause = CUT_OFF, "its runner was killed, or its node was lost"
        elif isinstance(entry.event, AttemptStarted):
            begun = entry.event
            share = begun.nnodes / begun.max_nodes if begun.max_nodes > begun.nnodes > 0 else 1.0
            attempts.append(AttemptAccount(entry.attempt, entry.time, nodes=begun.nodes, share=share))
        elif attempts:
            attempts[-1].take(entry)
    _find_lost(attempts, entries)
    return attempts


def account(
    entries: Sequence[Entry], now: float | None = None, attempts: Sequence[AttemptAccount] | None = None
) -> Ledger:
    """Attribute every second of a run to one cause; a run that is still going ends `now`, in seconds since the epoch.

    `attempts` are `attempts_of(entries)`, if the caller has them.
    """
    ledger = Ledger()
    if not entries:
        return ledger
    attempts = attempts_of(entries) if attempts is None else attempts
    book = _Book(ledger, entries[0].time)
    sessions = sessions_of(entries)
    for index, session in enumerate(sessions):
        begin, end = session[0].time, session[-1].time
        if index + 1 == len(sessions) and now is not None and not isinstance(session[-1].event, RunEnded):
            end = max(end, now)
        book.spend(NOT_RUNNING, begin, 0)
        before: AttemptAccount | None = None
        for attempt in attempts:
            if not begin <= attempt.began <= end:
                continue
            _between(book, before, attempt.began)
            _account_attempt(book, attempt, end)
            before = attempt
        _between(book, before, end)
    ledger.seconds = {cause: round(seconds, 3) for cause, seconds in ledger.seconds.items()}
    return ledger


def sessions_of(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Split a journal at every `RunStarted`: one list per session of the runner."""
    sessions: list[list[Entry]] = []
    for entry in entries:
        if isinstance(entry.event, RunStarted) or not sessions:
            sessions.append([])
        sessions[-1].append(entry)
    return sessions


def led_sessions(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the sessions in which a node led; what it followed is in its leader's journal."""
    return [entry for session in sessions_of(entries) if _is_led(session) for entry in session]


def _is_led(session: Sequence[Entry]) -> bool:
    first = session[0].event
    return not isinstance(first, RunStarted) or first.leads


class _Book:
    """Writes the account in the order of time: a second cannot be spent twice."""

    def __init__(self, ledger: Ledger, begin: float) -> None:
        self._ledger = ledger
        self.cursor = begin

    def spend(self, cause: str, until: float, attempt: int, shares: dict[str, float] | None = None) -> None:
        """Attribute all seconds up to a time to a cause; `shares` of them, in seconds, go to other causes."""
        seconds = until - self.cursor
        if seconds <= 0:
            return
        self._ledger.spans.append(Span(cause, self.cursor, until, attempt))
        self.cursor = until
        own = self._ledger.by_attempt.setdefault(attempt, dict.fromkeys(CAUSES, 0.0)) if attempt else {}
        rest = seconds
        for name, share in (shares or {}).items():
            share = min(max(share, 0.0), rest)
            rest -= share
            self._ledger.seconds[name] += share
            if own:
                own[name] += share
        self._ledger.seconds[cause] += rest
        if own:
            own[cause] += rest


def _between(book: _Book, before: AttemptAccount | None, until: float) -> None:
    """Account for the time from an attempt's end, or a session's begin, to the next attempt or the session's end."""
    if before is None:
        book.spend("start-up", until, 0)
        return
    # The backoff comes last; before it, snapshots are committed.
    book.spend("teardown", until - min(max(before.backoff_s, 0.0), until - book.cursor), before.number)
    book.spend("backoff", until, before.number)


def _account_attempt(book: _Book, attempt: AttemptAccount, end: float) -> None:
    number = attempt.number
    stop = min(attempt.ended if attempt.ended is not None else end, end)
    book.spend("launch", min(attempt.ranks_began or attempt.training_began or stop, stop), number)
    trained = attempt.training_began is not None
    book.spend("start-up", min(attempt.training_began or stop, stop), number, {"restore": attempt.restore_s})
    if not trained:
        return
    # One that runs takes steps, as far as is known: it reports each ten seconds that it does.
    last_at = min(stop, attempt.heard_at + _SILENCE_S) if attempt.kind == RUNNING else attempt.last_step_at
    last = min(max(last_at or book.cursor, book.cursor), stop)
    in_steps = last - book.cursor
    lost_s = in_steps * attempt.lost_steps / attempt.steps if attempt.steps > 0 else 0.0
    # Lost steps are lost together with their stalls and waits.
    kept = 1 - lost_s / in_steps if in_steps > 0 else 0.0
    shares = {
        LOST: lost_s,
        "evaluation": kept * attempt.evaluation_s,
        "checkpoint stall": kept * attempt.stall_s,
        "data wait": kept * attempt.data_wait_s,
    }
    shares[MISSING] = (1 - attempt.share) * max(in_steps - sum(max(share, 0.0) for share in shares.values()), 0.0)
    book.spend(TRAINING, last, number, shares)
    if attempt.failed_at is not None:
        book.spend(
            "hang wait" if attempt.kind == FailureKind.HUNG.value else "detection", min(attempt.failed_at, stop), number
        )
    book.spend("teardown", stop, number)


def _find_lost(attempts: Sequence[AttemptAccount], entries: Sequence[Entry]) -> None:
    """Set the steps of each attempt that the next one which trained had to compute again, or will have to."""
    run_ended = bool(entries) and isinstance(entries[-1].event, RunEnded)
    committed = max((entry.event.step for entry in entries if isinstance(entry.event, Committed)), default=0)
    starts: list[int] = []
    for attempt in reversed(attempts):
        if attempt.training_began is None or attempt.start_step is None:
            continue
        # A later attempt may have fallen back further than the next one.
        goes_on = min(starts, default=None)
        if goes_on is None and run_ended and attempt.kind not in (FailureKind.FINISHED.value, RUNNING):
            # Only what was committed outlives the run.
            goes_on = committed
        if goes_on is not None:
            attempt.lost_steps = min(max((attempt.last_step or 0) - goes_on, 0), max(attempt.steps, 0))
        starts.append(attempt.start_step)


@dataclass(frozen=True)
class NodeChange:
    """Two attempts that followed each other on different nodes.

    Attributes:
        attempt: Number of the second one.
        step: Step that it started from.
        came: Node ranks of the nodes that only the second one has.
        gone: Node ranks of the nodes that only the first one had.
        pause_s: Seconds from the last step of the first attempt to the beginning of the second one's training.
        lost_steps: Steps that had to be recomputed.
    """

    attempt: int
    step: int
    came: list[int]
    gone: list[int]
    pause_s: float
    lost_steps: int


def node_changes(attempts: Sequence[AttemptAccount]) -> list[NodeChange]:
    """Return what each change of the nodes has cost; attempts without a step are passed over."""
    trained = [attempt for attempt in attempts if attempt.training_began is not None and attempt.nodes]
    changes = []
    for before, after in pairwise(trained):
        came, gone = set(after.nodes) - set(before.nodes), set(before.nodes) - set(after.nodes)
        if came or gone:
            last_at = before.last_step_at or before.training_began or before.began
            pause_s = max((after.training_began or after.began) - last_at, 0.0)
            step = after.start_step or 0
            lost_steps = max((before.last_step or 0) - step, 0)
            change = NodeChange(after.number, step, sorted(came), sorted(gone), round(pause_s, 3), lost_steps)
            changes.append(change)
    return changes


def restarts_by_kind(attempts: Sequence[AttemptAccount]) -> Counter[str]:
    """Count the failed attempts by their kind."""
    return Counter(attempt.kind for attempt in attempts if attempt.failed)
