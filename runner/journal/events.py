"""The events of a run's journal: the runner's own here, those of ranks and agents in `checkpointing.agent.events`.

Every line of a journal is one event with the time and the attempt it belongs to. Lines, also those of older versions,
are parsed once (`parse`): readers match on classes and never look at a line's text. An event that this version does not
know is kept as `UnknownEvent`; a line that is damaged becomes `Malformed`, so that readers can count it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from checkpointing.agent.events import Event, MeasuredEvent

# Called with each event that happens.
Record = Callable[[Event], None]

# Names that events and fields had in journals of older versions.
_RENAMED_EVENTS = {"checkpoint_set_aside": "checkpoint_quarantined", "note_failed": "restart_state_failed"}
_RENAMED_FIELDS = {("resumed", "from"): "source"}
# Keys of every line; a message between processes may carry them too. They are not metrics.
_LINE_KEYS = ("time", "event", "attempt")


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event, name="run_started"):
    """A runner began to work on the run: the begin of a session.

    Attributes:
        run_id: Identity of the run's directory.
        pid: Process id of the runner.
        runner: `RunnerProcess` of the runner as a JSON object.
        namespace: PID namespace of the runner; process ids of another one mean nothing here.
        committed_step: Newest committed step, -1 if there is none.
        max_restarts: Failures that the budget allows between two new checkpoints.
        cost: The `cost` section of the configuration.
        location: `checkpoint.location`.
        place: Id of that location; None if it could not be asked.
        leads: Whether the runner leads the run. The journal of one that follows repeats what the leader's has.
    """

    run_id: str = ""
    pid: int | None = None
    runner: dict[str, Any] | None = None
    namespace: str | None = None
    committed_step: int = -1
    max_restarts: int | None = None
    cost: dict[str, Any] | None = None
    location: str | None = None
    place: str | None = None
    leads: bool = True


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(Event, name="attempt_started"):
    """An attempt began on this node.

    Attributes:
        nnodes: Nodes of the attempt.
        nodes: Their node ranks; empty for a run of one node.
        max_nodes: Nodes that the run may have; 0 for `nnodes`.
        launcher_pid: Process id of the launcher.
        agent_pid: Process id of the checkpoint agent.
    """

    nnodes: int = 1
    nodes: list[int] = field(default_factory=list)
    max_nodes: int = 0
    launcher_pid: int | None = None
    agent_pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankStarted(Event, name="rank_started"):
    """A rank of this node is running.

    Attributes:
        rank: Its global rank.
        pid: Its process id.
    """

    rank: int
    pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Event, name="progress"):
    """The ranks' heartbeats have reached a step; for scripts that log seldom.

    Attributes:
        step: The newest finished step.
    """

    step: int


@dataclass(frozen=True, kw_only=True)
class BestModel(Event, name="best_model"):
    """The bundled job wrote its best model.

    Attributes:
        step: Step whose weights it has.
    """

    step: int


@dataclass(frozen=True, kw_only=True)
class ProgramSaved(Event, name="program_saved"):
    """A program's own `torch.distributed.checkpoint` was committed, where the program keeps its checkpoints.

    Attributes:
        step: The last number in its name.
        tier: ``local`` or ``remote``.
        nbytes: Size of all its files.
        duration_s: Seconds from the begin of the save.
    """

    step: int
    tier: str = "local"
    nbytes: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class NothingSaved(Event, name="nothing_saved"):
    """A program trains, and nothing of it is saved.

    Attributes:
        reason: Why not.
    """

    reason: str

    def describe(self) -> str:
        """Say so, with where to read what helps."""
        return f"nothing is saved: {self.reason}; see docs/guides/frameworks.md"


@dataclass(frozen=True, kw_only=True)
class HangFound(Event, name="hang"):
    """Ranks sent no heartbeat within their deadline.

    Attributes:
        ranks: Which ones; empty if that is unknown.
        reason: What was expected of them.
        stacks: Files with the stacks of all ranks of this node.
    """

    ranks: list[int]
    reason: str
    stacks: list[str]


@dataclass(frozen=True, kw_only=True)
class ColdStart(Event, name="cold_start"):
    """From now on ranks start as fresh interpreters.

    Attributes:
        reason: Why forks of a preloaded process cannot be used.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class AgentEndedEarly(Event, name="agent_ended_early"):
    """The checkpoint agent was ended before it had committed everything.

    Attributes:
        waited_s: Seconds that it was waited for.
    """

    waited_s: float


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Event, name="attempt_ended"):
    """An attempt ended, on all nodes.

    Attributes:
        kind: Value of a `FailureKind`; one that this version does not know is kept.
        cause: Why, for people.
        rank: Rank that failed first; None if it was none.
        step: Last finished step.
        start_step: Step that the attempt started from.
        training_began: Seconds since the epoch; 0 if it did not come so far.
        last_step_at: Likewise, the end of the last finished step.
        failed_at: Likewise, the first sign of a failure; 0 if it ended well.
        committed_step: Newest committed step, -1 if there is none.
    """

    kind: str
    cause: str
    rank: int | None = None
    step: int
    start_step: int
    training_began: float = 0.0
    last_step_at: float = 0.0
    failed_at: float = 0.0
    committed_step: int = -1


@dataclass(frozen=True, kw_only=True)
class Backoff(Event, name="backoff"):
    """The runner waits before the next attempt.

    Attributes:
        delay_s: Seconds that it waits.
    """

    delay_s: float


@dataclass(frozen=True, kw_only=True)
class StepsSkipped(Event, name="steps_skipped"):
    """From now on training passes over these steps.

    Attributes:
        first: First step of the window.
        last: Last step of it.
    """

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class WaitingForNodes(Event, name="waiting_for_nodes"):
    """The leader waits until other nodes have connected and are ready.

    Attributes:
        nodes: Their node ranks.
    """

    nodes: list[int]


@dataclass(frozen=True, kw_only=True)
class NodesChanged(Event, name="nodes_changed"):
    """The next attempt of an elastic run has other nodes than the one before.

    Attributes:
        nodes: Node ranks of those that train from now on.
        came: Those of them that did not.
        gone: Those that trained and do not any more.
    """

    nodes: list[int]
    came: list[int]
    gone: list[int]


@dataclass(frozen=True, kw_only=True)
class LeaderChanged(Event, name="leader_changed"):
    """Another node leads the run: this one, after the leader was lost.

    Attributes:
        epoch: Number of its lease.
        node: Its node rank.
        host: Its address.
    """

    epoch: int
    node: int
    host: str


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event, name="stop_requested"):
    """The run was asked to stop.

    Attributes:
        reason: By what.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class SaveRequested(Event, name="save_requested"):
    """A checkpoint was asked for; it is made at a later step, and training continues.

    Attributes:
        source: By what.
        step: Last step that had ended by then.
        saves: Whether anything of the program is saved.
    """

    source: str
    step: int
    saves: bool = True


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice(Event, name="preemption_notice"):
    """The cloud announced that it will reclaim this node, or recommends to leave it.

    Attributes:
        source: The cloud.
        what: The kind of notice.
        seconds_left: Seconds until the announced end; None if the notice names none.
    """

    source: str
    what: str
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event, name="run_ended"):
    """The runner exits: the end of a session.

    Attributes:
        state: ``finished``, ``preempted`` or ``failed``.
        exit_code: The runner's exit code.
        reason: Why it ended.
    """

    state: str
    exit_code: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a newer version, with its name and fields."""

    event: str
    details: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the event as it was read."""
        return {"event": self.event, **self.details}


@dataclass(frozen=True, kw_only=True)
class Malformed(Event):
    """A line that a disk or a power cut damaged; its time and attempt are those of the line before, if it has none."""

    problem: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a journal.

    Attributes:
        time: Seconds since the epoch, by the journal's clock.
        attempt: Number of the newest attempt then; 0 before the first one.
        event: What happened.
    """

    time: float
    attempt: int
    event: Event

    def to_dict(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        values = self.event.to_dict()
        return {"time": self.time, "event": values.pop("event"), "attempt": self.attempt, **values}


def parse(line: Mapping[str, Any] | None, before: Entry | None = None) -> Entry | None:
    """Parse one line of a journal.

    Args:
        line: The line's JSON object; None if it is not one.
        before: The entry of the line before, if there is one.

    Returns:
        The entry; None if the line is damaged and there is no time to record that under.
    """
    if line is None:
        return _malformed(before, "is not a JSON object")
    time, attempt, name = _time(line.get("time")), line.get("attempt", 0), line.get("event")
    if time is None:
        return _malformed(before, "has no time")
    if not isinstance(attempt, int) or not 0 <= attempt < 2**53:
        return Entry(time, before.attempt if before is not None else 0, Malformed(problem=f"attempt={attempt!r}"))
    if not isinstance(name, str):
        return Entry(time, attempt, Malformed(problem="has no event"))
    details = {key: value for key, value in line.items() if key not in _LINE_KEYS}
    return Entry(time, attempt, parse_event(name, details))


def parse_event(name: str, details: Mapping[str, Any]) -> Event:
    """Return the event of a name, perhaps one of an older version, and its fields; `Malformed` if they are wrong."""
    details = {_RENAMED_FIELDS.get((name, key), key): value for key, value in details.items()}
    name = _RENAMED_EVENTS.get(name, name)
    known = Event.known.get(name)
    if known is None:
        return UnknownEvent(event=name, details=details)
    if issubclass(known, MeasuredEvent):
        details = _with_metrics(known, details)
    try:
        event: Event = _adapter(name).validate_python(details)
    except (ValidationError, RecursionError) as error:
        return Malformed(problem=f"{name}: {error}")
    return event


def _malformed(before: Entry | None, problem: str) -> Entry | None:
    return Entry(before.time, before.attempt, Malformed(problem=problem)) if before is not None else None


def _with_metrics(known: type[Event], details: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what is no field of the event in `metrics`."""
    own = {entry.name for entry in fields(known)} - {"metrics"}
    # Every line has its own copies of the names otherwise.
    metrics = {
        sys.intern(key): value
        for key, value in details.items()
        if key not in own and key not in _LINE_KEYS and _is_finite(value)
    }
    return {**{key: value for key, value in details.items() if key in own}, "metrics": metrics}


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else None


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(Event.known[name])
