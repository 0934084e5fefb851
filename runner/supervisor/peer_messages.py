"""Messages between the runners of one run's nodes, each checked against its type before anybody looks at it.

Anybody on the network can connect to the ports: a line that is no valid message closes its connection, nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from runner.recovery.kinds import Failure

Message = dict[str, Any]

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Positive = Annotated[int, Field(ge=1, lt=2**31)]
_Text = Annotated[str, Field(max_length=10_000)]
_Scalar = _Text | int | float | bool | None


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class _Details(BaseModel):
    """Of an event; further names go into the journal as they are."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    __pydantic_extra__: dict[str, _Scalar]


def _is_failure(fields: Message) -> Message:
    try:
        Failure.from_dict(fields)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"no failure: {error!r}") from None
    return fields


class _Ping(_Strict):
    do: Literal["ping"]


# -- to the first node -----------------------------------------------------------------------------------------------


class _Hello(_Strict):
    """`job`: what `JobIdentity.to_json` has made; empty where it is not to be compared."""

    do: Literal["hello"]
    node_rank: _Count
    job: Annotated[str, Field(max_length=500_000)] = ""


class _Ready(_Strict):
    """`nproc`: ranks on this node."""

    do: Literal["ready"]
    nproc: _Positive


class _Ended(_Strict):
    do: Literal["ended"]
    attempt: _Count
    failure: Annotated[Message, AfterValidator(_is_failure)]


class _Started(_Details):
    step: _Count
    total_steps: _Count | None


class _Log(_Details):
    step: _Count
    loss: float


class _Resumed(_Details):
    step: _Count
    source: _Text = Field(alias="from")


class _Batch(_Details):
    micro_batch: _Positive
    accumulation: _Positive


class _EventBase(_Strict):
    do: Literal["event"]
    attempt: _Count


class _StartedEvent(_EventBase):
    event: Literal["training_started"]
    details: _Started


class _LogEvent(_EventBase):
    event: Literal["log"]
    details: _Log


class _ResumedEvent(_EventBase):
    event: Literal["resumed"]
    details: _Resumed


class _BatchEvent(_EventBase):
    event: Literal["batch_shape"]
    details: _Batch


_Event = Annotated[_StartedEvent | _LogEvent | _ResumedEvent | _BatchEvent, Field(discriminator="event")]


# -- both ways -------------------------------------------------------------------------------------------------------


class _Busy(_Strict):
    do: Literal["busy"]
    busy: bool


class _Stop(_Strict):
    do: Literal["stop"]
    reason: _Text


# -- to the others ---------------------------------------------------------------------------------------------------


class _Welcome(_Strict):
    do: Literal["welcome"]
    run_id: Annotated[str, Field(pattern=r"^[\w.-]{1,100}$")]


class _Begin(_Strict):
    """The fields of `runner.node.messages.AttemptSpec`."""

    do: Literal["begin"]
    attempt: _Count
    nnodes: _Positive
    divisor: _Positive
    skipped: _Text
    failure_history: _Text
    lineage: _Text
    lost_steps: _Count
    reached: _Count
    resume_from: _Text
    allow_changes: bool


class _End(_Strict):
    do: Literal["end"]
    attempt: _Count
    stacks: bool


class _Finish(_Strict):
    do: Literal["finish"]
    exit_code: Literal[0, 2, 74, 75, 76, 78, 79, 80, 81]
    reason: _Text = "as the first machine's runner has ended"


_TO_LEADER: TypeAdapter[Any] = TypeAdapter(_Hello | _Ready | _Ended | _Event | _Busy | _Stop | _Ping)
_TO_MEMBER: TypeAdapter[Any] = TypeAdapter(_Welcome | _Begin | _End | _Finish | _Busy | _Stop | _Ping)


def read_by_leader(line: bytes) -> Message:
    """
    Raises:
        ValueError: it is no message that a node sends to the first one.
    """
    return _dumped(_TO_LEADER.validate_json(line))


def read_by_member(line: bytes) -> Message:
    """
    Raises:
        ValueError: it is no message that the first node sends.
    """
    return _dumped(_TO_MEMBER.validate_json(line))


def _dumped(message: BaseModel) -> Message:
    return message.model_dump(by_alias=True)
