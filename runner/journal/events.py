"""The events of a run's journal: the runner's own here, those of ranks and agents in `checkpointing.agent.events`.

Every line of a journal is one event with the time and the attempt it belongs to. Lines are parsed once (`parsing.py`):
readers match on classes and never look at a line's text. An event that this version does not know is kept as
`UnknownEvent`; a line that is damaged becomes `Malformed`, so that readers can count it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpointing.agent.events import Event

# Called with each event that happens.
Record = Callable[[Event], None]


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
    """An event of a newer version.

    Attributes:
        event: Its name.
        details: Its fields.
    """

    event: str
    details: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the event as it was read."""
        return {"event": self.event, **self.details}


@dataclass(frozen=True, kw_only=True)
class Malformed(Event):
    """A line that a disk or a power cut damaged; its time and attempt are those of the line before, if it has none.

    Attributes:
        problem: What is wrong with it.
    """

    problem: str


@dataclass(frozen=True)
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
