"""Where every second of a run went: a fold over its journal alone.

Each second between the first event and the last belongs to exactly one cause. Goodput is the share of them that went
into steps that count: ETTR, the effective training time ratio of "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters" (arXiv 2410.21680), with the waiting between two lives of the run in the denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.journal.journal import Event

# Ways in which an attempt ends, or does not, that cost no budget.
NO_FAILURE = ("finished", "running", "preempted", "ended at once")

# How an attempt has ended of which the journal says nothing more.
CUT_OFF = "cut off"

TRAINING, LOST, WAITING = "training", "lost work", "not running"
# In this order.
CAUSES = [
    TRAINING,  # steps that count
    "checkpoint stall",  # training waits while a snapshot is taken
    "data wait",  # training waits for a batch
    "evaluation",
    LOST,  # steps that had to be computed again
    "detection",  # last finished step to the first sign that something has failed; the step in the making is in it
    "hang wait",  # the same, where what failed was silence
    "teardown",  # to the end of the attempt, and of what was still to be committed
    "backoff",
    "start-up",  # of the runner's processes, and of an attempt's: imports, data, model
    "launch",  # an attempt's begin to its first rank; the wait for other machines is in it
    "restore",  # choosing, reading and loading a checkpoint or snapshot
    WAITING,  # no runner alive: preempted, killed, or not started again yet
]


@dataclass
class Attempt:
    """One attempt. Times are seconds since the epoch, None where it never came so far.

    Attributes:
        ranks_began: when the first rank was there.
        failed_at: first sign that it had failed.
        restore_s, stall_s, evaluation_s: seconds of rank 0, as it has told them.
        data_wait: of each log entry: the step it is of, and seconds per step.
        backoff_s: the wait after it.
    """

    number: int
    began: float
    ranks_began: float | None = None
    start_step: int | None = None
    training_began: float | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    failed_at: float | None = None
    ended: float | None = None
    kind: str = "running"
    cause: str = ""
    restore_s: float = 0.0
    stall_s: float = 0.0
    evaluation_s: float = 0.0
    data_wait: list[tuple[int, float]] = field(default_factory=list)
    backoff_s: float = 0.0
    lost_steps: int = 0

    @property
    def steps(self) -> int:
        return (self.last_step or 0) - (self.start_step or 0)

    @property
    def data_wait_s(self) -> float:
        """Of all steps that log entries tell of."""
        total, last = 0.0, self.start_step or 0
        for step, seconds in self.data_wait:
            total += max(step - last, 0) * seconds
            last = step
        return total

    def take(self, event: Event) -> None:
        """Take in an event of this attempt."""
        match event["event"]:
            case "rank_started":
                self.ranks_began = self.ranks_began or event["time"]
            case "training_started" if not event.get("stage"):
                self.start_step = self.last_step = int(event["step"])
                self.training_began = event["time"]
            case "restored":
                self.restore_s += float(event["seconds"])
            case "snapshot_cost":
                self.stall_s += float(event["blocked_s"])
            case "evaluated":
                self.evaluation_s += float(event["eval_runtime"])
            case "log":
                self.last_step, self.last_step_at = int(event.get("run_step") or event["step"]), event["time"]
                if event.get("data_wait_s") is not None:
                    self.data_wait.append((self.last_step, float(event["data_wait_s"])))
            case "attempt_ended":
                self.ended, self.kind, self.cause = event["time"], str(event["kind"]), str(event["cause"])
                self.last_step, self.start_step = int(event["step"]), int(event["start_step"])
                # The heartbeat's times are the ranks' own, finer than those of the messages.
                self.training_began = float(event["training_began"]) or self.training_began
                self.last_step_at = float(event["last_step_at"]) or self.last_step_at
                self.failed_at = float(event.get("failed_at") or 0.0) or None
            case "backoff":
                self.backoff_s += float(event["delay_s"])
            case _:
                pass


@dataclass(frozen=True)
class Span:
    """A stretch of the run's time. `attempt`: 0 outside of any."""

    cause: str
    begin: float
    end: float
    attempt: int


@dataclass
class Ledger:
    """The account.

    Attributes:
        seconds: by cause; they sum to the wall time.
        by_attempt: likewise for each attempt, by its number, with what came between it and the next one.
        spans: the same seconds where they lie, in order and without gaps; what is spread over an attempt's training
            (stall, data wait, evaluation, lost work) lies in one stretch of TRAINING there.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    by_attempt: dict[int, dict[str, float]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into steps that count."""
        return self.seconds[TRAINING] / self.wall_s if self.wall_s else 0.0


def attempts_of(events: Sequence[Event]) -> list[Attempt]:
    """Every attempt of a journal, oldest first, with the steps that each one has lost.

    What a disk has damaged is passed over.
    """
    attempts: list[Attempt] = []
    for event in events:
        try:
            if event["event"] == "run_started" and attempts and attempts[-1].ended is None:
                attempts[-1].kind, attempts[-1].cause = CUT_OFF, "its runner was killed, or its machine was lost"
            elif event["event"] == "attempt_started":
                attempts.append(Attempt(int(event["attempt"]), event["time"]))
            elif attempts:
                attempts[-1].take(event)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    _find_lost(attempts, events)
    return attempts


def account(events: Sequence[Event], now: float | None = None, attempts: Sequence[Attempt] | None = None) -> Ledger:
    """Give every second to its cause. `now` closes the account of a run that is still going."""
    ledger = Ledger()
    if not events:
        return ledger
    attempts = attempts_of(events) if attempts is None else attempts
    book = _Book(ledger, events[0]["time"])
    lives = lives_of(events)
    for index, life in enumerate(lives):
        begin, end = life[0]["time"], life[-1]["time"]
        if index + 1 == len(lives) and now is not None and life[-1]["event"] != "run_ended":
            end = max(end, now)
        book.spend(WAITING, begin, 0)
        before: Attempt | None = None
        for attempt in attempts:
            if not begin <= attempt.began <= end:
                continue
            _between(book, before, attempt.began)
            _account_attempt(book, attempt, end)
            before = attempt
        _between(book, before, end)
    ledger.seconds = {cause: round(seconds, 3) for cause, seconds in ledger.seconds.items()}
    return ledger


def lives_of(events: Sequence[Event]) -> list[list[Event]]:
    """Events cut at every `run_started`: one list per life of the supervisor."""
    lives: list[list[Event]] = []
    for event in events:
        if event["event"] == "run_started" or not lives:
            lives.append([])
        lives[-1].append(event)
    return lives


class _Book:
    """Writes the account from left to right: time that was spent once cannot be spent again."""

    def __init__(self, ledger: Ledger, begin: float) -> None:
        self._ledger = ledger
        self.cursor = begin

    def spend(self, cause: str, until: float, attempt: int, shares: dict[str, float] | None = None) -> None:
        """All seconds up to a time; `shares` of them, in seconds, go to other causes."""
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


def _between(book: _Book, before: Attempt | None, until: float) -> None:
    """From an attempt's end, or a life's begin, to the next attempt, or the life's end."""
    if before is None:
        book.spend("start-up", until, 0)
        return
    # Last what the next attempt waited for; before it the commit of what was snapshotted.
    book.spend("teardown", until - min(max(before.backoff_s, 0.0), until - book.cursor), before.number)
    book.spend("backoff", until, before.number)


def _account_attempt(book: _Book, attempt: Attempt, end: float) -> None:
    number = attempt.number
    stop = min(attempt.ended if attempt.ended is not None else end, end)
    book.spend("launch", min(attempt.ranks_began or attempt.training_began or stop, stop), number)
    trained = attempt.training_began is not None
    book.spend("start-up", min(attempt.training_began or stop, stop), number, {"restore": attempt.restore_s})
    if not trained:
        return
    last = min(max(attempt.last_step_at or book.cursor, book.cursor), stop)
    in_steps = last - book.cursor
    lost_s = in_steps * attempt.lost_steps / attempt.steps if attempt.steps > 0 else 0.0
    # What is lost is lost with its stalls and waits.
    kept = 1 - lost_s / in_steps if in_steps > 0 else 0.0
    shares = {
        LOST: lost_s,
        "evaluation": kept * attempt.evaluation_s,
        "checkpoint stall": kept * attempt.stall_s,
        "data wait": kept * attempt.data_wait_s,
    }
    book.spend(TRAINING, last, number, shares)
    if attempt.failed_at is not None:
        book.spend("hang wait" if attempt.kind == "hung" else "detection", min(attempt.failed_at, stop), number)
    book.spend("teardown", stop, number)


def _find_lost(attempts: Sequence[Attempt], events: Sequence[Event]) -> None:
    """Steps of each attempt that the next one which trained had to compute again, or will have to."""
    run_ended = bool(events) and events[-1]["event"] == "run_ended"
    committed = max(
        (e["step"] for e in events if e["event"] == "committed" and isinstance(e.get("step"), int)), default=0
    )
    starts: list[int] = []
    for attempt in reversed(attempts):
        if attempt.training_began is None or attempt.start_step is None:
            continue
        # A later one may have fallen back further than the next.
        goes_on = min(starts, default=None)
        if goes_on is None and run_ended and attempt.kind not in ("finished", "running"):
            # Nothing but what was committed outlives the run.
            goes_on = committed
        if goes_on is not None:
            attempt.lost_steps = min(max((attempt.last_step or 0) - goes_on, 0), max(attempt.steps, 0))
        starts.append(attempt.start_step)


def restarts_by_kind(attempts: Sequence[Attempt]) -> Counter[str]:
    """How many attempts have ended in each way that is no end of the run."""
    return Counter(attempt.kind for attempt in attempts if attempt.kind not in NO_FAILURE)
