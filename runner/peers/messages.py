"""Messages between the runners of one run's nodes: one class per message, validated before it is used.

Any host on the network can connect to the ports: a line that is not a valid message closes its connection and changes
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter

from checkpointing.agent.events import BatchShape, Event, Log, Resumed, SlowRanks, StepsRepeated, TrainingStarted
from runner.journal.attempts import AttemptSpec, Count, Positive, Text
from runner.journal.events import parse_event
from runner.recovery.failure import Failure

# Events that only the node of rank 0 sees, and that the leader's journal and console show.
FORWARDED = (TrainingStarted, Log, Resumed, BatchShape, SlowRanks, StepsRepeated)

# Characters of a reason, which is for people.
MAX_REASON = 5000


def _failure(value: object) -> Failure:
    if isinstance(value, Failure):
        return value
    try:
        return Failure.from_dict(value)  # type: ignore[arg-type]
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not a failure: {error!r}") from None


def _event(value: object) -> Event:
    if isinstance(value, Event):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        raise ValueError("not an event")
    event = parse_event(value["event"], {name: field for name, field in value.items() if name != "event"})
    if not isinstance(event, FORWARDED):
        raise ValueError(f"not an event that nodes forward: {value['event']!r}")
    return event


class PeerMessage(BaseModel):
    """Base of the messages; `do` names the message on the wire."""

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, extra="ignore", frozen=True, arbitrary_types_allowed=True
    )

    def encode(self) -> bytes:
        """Return the message as one line of JSON."""
        return json.dumps(self.model_dump()).encode() + b"\n"


class Ping(PeerMessage):
    """A keepalive."""

    do: Literal["ping"] = "ping"


# -- to the leader ---------------------------------------------------------------------------------------------------


class Hello(PeerMessage):
    """A node introduces itself.

    Attributes:
        node_rank: Its node rank.
        job: `JobIdentity.to_json` of its job; empty if it is not to be compared.
        machine: Identity of its machine; empty if unknown.
        session: Identity of its process; empty if unknown.
    """

    do: Literal["hello"] = "hello"
    node_rank: Count
    job: Annotated[str, Field(max_length=500_000)] = ""
    machine: Annotated[str, Field(max_length=200)] = ""
    session: Annotated[str, Field(max_length=200)] = ""


class Ready(PeerMessage):
    """A node's processes are up.

    Attributes:
        nproc: Ranks on the node.
        has_state: Whether it may hold a snapshot of the run.
    """

    do: Literal["ready"] = "ready"
    nproc: Positive
    has_state: bool = False


class Ended(PeerMessage):
    """An attempt has ended on a node."""

    do: Literal["ended"] = "ended"
    attempt: Count
    failure: Annotated[
        Failure, BeforeValidator(_failure), PlainSerializer(lambda failure: failure.to_dict(), return_type=dict)
    ]


class Forwarded(PeerMessage):
    """An event that was reported on a node, one of `FORWARDED`."""

    do: Literal["event"] = "event"
    attempt: Count
    event: Annotated[Event, BeforeValidator(_event), PlainSerializer(lambda event: event.to_dict(), return_type=dict)]


# -- in both directions ----------------------------------------------------------------------------------------------


class Busy(PeerMessage):
    """Whether a rank of the sender's node, or of the sender's peers, is legitimately not computing steps."""

    do: Literal["busy"] = "busy"
    busy: bool


class StopRun(PeerMessage):
    """The run was asked to stop."""

    do: Literal["stop"] = "stop"
    reason: Text


# -- from the leader -------------------------------------------------------------------------------------------------


class Welcome(PeerMessage):
    """The leader accepts a node.

    Attributes:
        run_id: Identity of the run.
        epoch: In which the leader leads; 0 if it has no lease.
        running: Whether an attempt of other nodes runs, which must not wait for what this one can do before it takes
            part.
    """

    do: Literal["welcome"] = "welcome"
    run_id: Annotated[str, Field(pattern=r"^[\w.-]{1,100}$")]
    epoch: Count = 0
    running: bool = False


class Begin(PeerMessage):
    """An attempt begins."""

    do: Literal["begin"] = "begin"
    spec: AttemptSpec


class End(PeerMessage):
    """An attempt is over: kill its ranks, whose `stacks` may be asked for before."""

    do: Literal["end"] = "end"
    attempt: Count
    stacks: bool


class Finish(PeerMessage):
    """The run has ended, or does not admit the node, whose runner exits with the code."""

    do: Literal["finish"] = "finish"
    exit_code: Literal[0, 2, 74, 75, 76, 78, 79, 80, 81]
    reason: Text = "as the leader has ended"


ToLeader = Hello | Ready | Ended | Forwarded | Busy | StopRun | Ping
ToMember = Welcome | Begin | End | Finish | Busy | StopRun | Ping

# Parse a line that the other side has sent; raise ValueError if it is not one of its messages.
read_by_leader: Callable[[bytes], ToLeader] = TypeAdapter[Any](
    Annotated[ToLeader, Field(discriminator="do")]
).validate_json
read_by_member: Callable[[bytes], ToMember] = TypeAdapter[Any](
    Annotated[ToMember, Field(discriminator="do")]
).validate_json
