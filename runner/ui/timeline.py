"""The figures of a report: a fold over a journal. Drawing is in `charts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from checkpointing.agent.events import CheckpointQuarantined, CommitFailedEvent, Committed, Log, SnapshotCost
from runner.journal.events import AttemptStarted, Entry, RunStarted
from runner.journal.ledger import CAUSES, LOST, NOT_RUNNING, TRAINING, AttemptAccount, Ledger, Span, account
from runner.journal.summary import RunSummary, evaluations_of, summarise

# What a run without interruptions would have spent as well.
_IN_STEPS = (TRAINING, "checkpoint stall", "data wait", "evaluation")
_BEFORE_STEPS = ("start-up", "launch", "restore")


@dataclass(frozen=True)
class LogEntry:
    """One log entry.

    Attributes:
        step: Step, counted over all stages.
        lost: Whether the step was recomputed later, or is not part of the result.
    """

    attempt: int
    step: int
    lost: bool
    log: Log


@dataclass
class Save:
    """One checkpoint.

    Attributes:
        attempt: The attempt that saved it.
        blocked_s: Seconds that training waited for its snapshot; None if that was not measured.
        write_s: Seconds that each tier took.
        nbytes: Size of all its files.
    """

    step: int
    attempt: int
    blocked_s: float | None = None
    write_s: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment, in seconds since the run's first event.

    Its kind is ``failure``, ``committed``, ``save failed`` or ``quarantined``.
    """

    kind: str
    at: float
    attempt: int
    text: str


@dataclass(frozen=True)
class Cost:
    """Money, in units of `currency`.

    Attributes:
        price_per_hour: Of one node, without the discount.
        spot_discount: Share of the price that is saved, from 0 to 1.
        node_s: Seconds of all nodes that are paid for; those without a runner are not.
        paid: Price of them, at the discount.
        lost: The part of it that interruptions took.
        on_demand: Price of the same steps without the discount and without an interruption.
    """

    currency: str
    price_per_hour: float
    spot_discount: float
    node_s: float
    paid: float
    lost: float
    on_demand: float

    @property
    def saved(self) -> float:
        """Difference to an undisturbed run at the full price."""
        return self.on_demand - self.paid


@dataclass
class Timeline:
    """A run, ready to be drawn. Times are seconds since the run's first event.

    Attributes:
        began_at: Time of its first event, in seconds since the epoch.
        spans: Stretches of time by cause, with lost steps at the end of their attempt's training.
        evaluations: Metrics of the evaluations that count, by step.
        marks: Failures, commits and other moments.
        cost: What it cost; None without a price.
    """

    run: RunSummary
    ledger: Ledger
    began_at: float
    spans: list[Span]
    logs: list[LogEntry]
    evaluations: dict[int, dict[str, float]]
    saves: list[Save]
    marks: list[Mark]
    cost: Cost | None


def build_timeline(
    entries: Sequence[Entry],
    now: float | None = None,
    price_per_hour: float | None = None,
    spot_discount: float | None = None,
) -> Timeline:
    """Fold a journal of at least one entry, oldest first.

    Args:
        entries: The journal.
        now: Seconds since the epoch, the end of the account of a run that is still going; None for the last event.
        price_per_hour: Price of one node on demand; None for the one that the run was started with.
        spot_discount: Share of it that is saved, from 0 to 1; None for the one that the run was started with.
    """
    run = summarise(entries, now)
    ledger = account(entries, now, run.attempts)
    began_at = entries[0].time
    return Timeline(
        run,
        ledger,
        began_at,
        _spans(ledger, began_at),
        _logs(entries, run.attempts),
        evaluations_of(entries),
        _saves(entries),
        _marks(entries, run.attempts, began_at),
        _cost(entries, ledger, run.attempts, price_per_hour, spot_discount),
    )


def _spans(ledger: Ledger, began_at: float) -> list[Span]:
    """Return the ledger's spans with lost steps at the end of their attempt's training, where they were computed."""
    spans = []
    for span in ledger.spans:
        begin, end = span.begin - began_at, span.end - began_at
        lost_s = ledger.by_attempt.get(span.attempt, {}).get(LOST, 0.0) if span.cause == TRAINING else 0.0
        cut = max(end - lost_s, begin)
        if cut > begin:
            spans.append(Span(span.cause, begin, cut, span.attempt))
        if end > cut:
            spans.append(Span(LOST, cut, end, span.attempt))
    return spans


def _logs(entries: Sequence[Entry], attempts: Sequence[AttemptAccount]) -> list[LogEntry]:
    kept_to = {attempt.number: (attempt.last_step or 0) - attempt.lost_steps for attempt in attempts}
    logs = []
    for entry in entries:
        if isinstance(entry.event, Log):
            step = entry.event.step_of_run
            logs.append(LogEntry(entry.attempt, step, step > kept_to.get(entry.attempt, step), entry.event))
    return logs


def _saves(entries: Sequence[Entry]) -> list[Save]:
    saves: dict[tuple[int, int], Save] = {}
    blocked: dict[tuple[int, int], float] = {}
    for entry in entries:
        match entry.event:
            case SnapshotCost(step=step, blocked_s=blocked_s):
                blocked[entry.attempt, step] = blocked_s
            case Committed(step=step, tier=tier, duration_s=float(duration_s), nbytes=int(nbytes)):
                save = saves.setdefault((entry.attempt, step), Save(step, entry.attempt))
                save.write_s[tier], save.nbytes = duration_s, nbytes
            case _:
                pass
    for key, save in saves.items():
        save.blocked_s = blocked.get(key)
    return list(saves.values())


def _marks(entries: Sequence[Entry], attempts: Sequence[AttemptAccount], began_at: float) -> list[Mark]:
    marks = []
    for attempt in attempts:
        if attempt.failed:
            at = attempt.failed_at or attempt.ended or attempt.last_step_at or attempt.began
            marks.append(Mark("failure", at - began_at, attempt.number, f"{attempt.kind}: {attempt.cause}"))
    for entry in entries:
        match entry.event:
            case Committed(step=step, tier=tier):
                kind, text = "committed", f"step {step} ({tier})"
            case CommitFailedEvent(error=error):
                kind, text = "save failed", error
            case CheckpointQuarantined(reason=reason):
                kind, text = "quarantined", reason
            case _:
                continue
        marks.append(Mark(kind, entry.time - began_at, entry.attempt, text))
    return marks


def undisturbed_s(ledger: Ledger, attempts: Sequence[AttemptAccount]) -> float:
    """Return the seconds that the same steps take without an interruption: one start, the steps, and one end."""
    seconds = sum(ledger.seconds[cause] for cause in _IN_STEPS)
    # The runner's own start-up, before its first attempt.
    if ledger.spans and (ledger.spans[0].cause, ledger.spans[0].attempt) == ("start-up", 0):
        seconds += ledger.spans[0].end - ledger.spans[0].begin
    trained = [
        attempt for attempt in attempts if attempt.training_began is not None and attempt.number in ledger.by_attempt
    ]
    if trained:
        first, last = ledger.by_attempt[trained[0].number], ledger.by_attempt[trained[-1].number]
        seconds += sum(first[cause] for cause in _BEFORE_STEPS)
        seconds += last["teardown"] if trained[-1].kind == "finished" else 0.0
    return seconds


def _cost(
    entries: Sequence[Entry],
    ledger: Ledger,
    attempts: Sequence[AttemptAccount],
    price_per_hour: float | None,
    spot_discount: float | None,
) -> Cost | None:
    configured = next(
        (e.event.cost for e in reversed(entries) if isinstance(e.event, RunStarted) and e.event.cost is not None), {}
    )
    price = _number(configured.get("price_per_hour")) if price_per_hour is None else price_per_hour
    discount = _number(configured.get("spot_discount")) if spot_discount is None else spot_discount
    if price is None:
        return None
    discount = discount or 0.0
    begun = [e.event for e in entries if isinstance(e.event, AttemptStarted)]
    nnodes = max((max(event.nnodes, event.max_nodes) for event in begun), default=1)
    # A node that is down while the others wait for it is not paid for either; those that wait are, and so are those of
    # an elastic run that train.
    shares = {attempt.number: attempt.share for attempt in attempts}
    node_s = nnodes * sum(
        shares.get(span.attempt, 1.0) * (span.end - span.begin) for span in ledger.spans if span.cause != NOT_RUNNING
    )
    steps_s = min(nnodes * undisturbed_s(ledger, attempts), node_s)
    paid_per_s, full_per_s = price * (1 - discount) / 3600, price / 3600
    return Cost(
        str(configured.get("currency") or "USD"),
        price,
        discount,
        node_s,
        node_s * paid_per_s,
        (node_s - steps_s) * paid_per_s,
        steps_s * full_per_s,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def goodput_of(ledger: Ledger, attempt: int) -> float:
    """Return the share of an attempt's seconds that was spent on steps that count, from 0 to 1."""
    own = ledger.by_attempt.get(attempt, dict.fromkeys(CAUSES, 0.0))
    return own[TRAINING] / sum(own.values()) if sum(own.values()) else 0.0
