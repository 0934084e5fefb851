"""What a report shows, as figures: a fold over a journal. No drawing here."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.journal.journal import Event
from runner.journal.ledger import CAUSES, LOST, NO_FAILURE, TRAINING, WAITING, Attempt, Ledger, Span, account
from runner.journal.summary import RunSummary, summarise

# Of an attempt, what a run without interruptions would have spent, too.
_IN_STEPS = (TRAINING, "checkpoint stall", "data wait", "evaluation")
_BEFORE_STEPS = ("start-up", "launch", "restore")


@dataclass(frozen=True)
class LogEntry:
    """One of the Trainer's log entries. `lost`: the step was computed again later, or is not part of the result."""

    attempt: int
    step: int
    lost: bool
    loss: float
    tokens_per_s: float | None
    peak_memory_gb: float | None


@dataclass
class Save:
    """One checkpoint: seconds that training waited for its snapshot, and that each tier took to be written."""

    step: int
    attempt: int
    blocked_s: float | None = None
    write_s: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment. `kind`: fault, committed, save failed, or set aside."""

    kind: str
    at: float
    attempt: int
    text: str


@dataclass(frozen=True)
class Cost:
    """Money, in units of `currency`.

    Attributes:
        machine_s: seconds of all machines that are paid for; those in which no runner lived are not.
        paid: for them, at the discount.
        lost: the part of it that interruptions took.
        on_demand: what the same steps cost without the discount and without an interruption.
    """

    currency: str
    price_per_hour: float
    spot_discount: float
    machine_s: float
    paid: float
    lost: float
    on_demand: float

    @property
    def saved(self) -> float:
        return self.on_demand - self.paid


@dataclass
class Story:
    """A run, ready to be drawn. Times are seconds since the run's first event."""

    run: RunSummary
    ledger: Ledger
    began_at: float
    spans: list[Span]
    logs: list[LogEntry]
    saves: list[Save]
    marks: list[Mark]
    cost: Cost | None


def tell(
    events: Sequence[Event],
    now: float | None = None,
    price_per_hour: float | None = None,
    spot_discount: float | None = None,
) -> Story:
    """Fold a journal (oldest event first, at least one).

    Args:
        now: closes the account of a run that is still going.
        price_per_hour, spot_discount: in place of those that the run was started with.
    """
    run = summarise(events, now)
    ledger = account(events, now, run.attempts)
    began_at = events[0]["time"]
    return Story(
        run,
        ledger,
        began_at,
        _spans(ledger, began_at),
        _logs(events, run.attempts),
        _saves(events),
        [*_faults(run.attempts, began_at), *_marks(events, began_at)],
        _cost(events, ledger, run.attempts, price_per_hour, spot_discount),
    )


def _spans(ledger: Ledger, began_at: float) -> list[Span]:
    """The ledger's, with the steps that were lost at the end of their attempt's training, where they were made."""
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


def _logs(events: Sequence[Event], attempts: Sequence[Attempt]) -> list[LogEntry]:
    kept_to = {attempt.number: (attempt.last_step or 0) - attempt.lost_steps for attempt in attempts}
    logs = []
    for event in events:
        if event["event"] != "log":
            continue
        # What a disk has damaged is passed over.
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            # Counted over all trainings of the script.
            number, step = int(event["attempt"]), int(event.get("run_step") or event["step"])
            logs.append(
                LogEntry(
                    number,
                    step,
                    step > kept_to.get(number, step),
                    float(event["loss"]),
                    _number(event.get("tokens_per_s")),
                    _number(event.get("peak_memory_gb")),
                )
            )
    return logs


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _saves(events: Sequence[Event]) -> list[Save]:
    saves: dict[tuple[int, int], Save] = {}
    blocked: dict[tuple[int, int], float] = {}
    for event in events:
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            if event["event"] == "snapshot_cost":
                blocked[int(event["attempt"]), int(event["step"])] = float(event["blocked_s"])
            elif event["event"] == "committed":
                key = int(event["attempt"]), int(event["step"])
                save = saves.setdefault(key, Save(key[1], key[0]))
                save.write_s[str(event["tier"])] = float(event["duration_s"])
                save.nbytes = int(event["nbytes"])
    for key, save in saves.items():
        save.blocked_s = blocked.get(key)
    return list(saves.values())


def _faults(attempts: Sequence[Attempt], began_at: float) -> list[Mark]:
    marks = []
    for attempt in attempts:
        if attempt.kind not in NO_FAILURE:
            at = attempt.failed_at or attempt.ended or attempt.last_step_at or attempt.began
            marks.append(Mark("fault", at - began_at, attempt.number, f"{attempt.kind}: {attempt.cause}"))
    return marks


def _marks(events: Sequence[Event], began_at: float) -> list[Mark]:
    marks = []
    for event in events:
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            at, attempt = event["time"] - began_at, int(event["attempt"])
            match event["event"]:
                case "committed":
                    marks.append(Mark("committed", at, attempt, f"step {int(event['step'])} ({event['tier']})"))
                case "commit_failed":
                    marks.append(Mark("save failed", at, attempt, str(event["error"])))
                case "checkpoint_set_aside":
                    marks.append(Mark("set aside", at, attempt, str(event["reason"])))
                case _:
                    pass
    return marks


def undisturbed_s(ledger: Ledger, attempts: Sequence[Attempt]) -> float:
    """Seconds that the same steps would have taken without an interruption: one start, the steps, and one end."""
    seconds = sum(ledger.seconds[cause] for cause in _IN_STEPS)
    # The runner's own, before its first attempt.
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
    events: Sequence[Event],
    ledger: Ledger,
    attempts: Sequence[Attempt],
    price_per_hour: float | None,
    spot_discount: float | None,
) -> Cost | None:
    told: Event = next(
        (e["cost"] for e in reversed(events) if e["event"] == "run_started" and isinstance(e.get("cost"), dict)), {}
    )
    price = _number(told.get("price_per_hour")) if price_per_hour is None else price_per_hour
    discount = _number(told.get("spot_discount")) if spot_discount is None else spot_discount
    if price is None:
        return None
    discount = discount or 0.0
    # A machine that is down while the others wait for it is not paid for, either; who is there waits at its price.
    nnodes = max(
        (e["nnodes"] for e in events if e["event"] == "attempt_started" and isinstance(e.get("nnodes"), int)), default=1
    )
    machine_s = nnodes * (ledger.wall_s - ledger.seconds[WAITING])
    steps_s = min(nnodes * undisturbed_s(ledger, attempts), machine_s)
    paid_per_s, full_per_s = price * (1 - discount) / 3600, price / 3600
    return Cost(
        str(told.get("currency") or "USD"),
        price,
        discount,
        machine_s,
        machine_s * paid_per_s,
        (machine_s - steps_s) * paid_per_s,
        steps_s * full_per_s,
    )


def goodput_of(ledger: Ledger, attempt: int) -> float:
    """Share of an attempt's seconds that went into steps that count."""
    own = ledger.by_attempt.get(attempt, dict.fromkeys(CAUSES, 0.0))
    return own[TRAINING] / sum(own.values()) if sum(own.values()) else 0.0
