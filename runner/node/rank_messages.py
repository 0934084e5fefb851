"""What ranks tell their supervisor, each message checked against its type before anybody looks at it.

Any process of the same user can write to the socket: a datagram that is no such message is passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Message = dict[str, Any]

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, Field(max_length=100_000)]
# A path is given to the system, which takes no NUL.
_Path = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]


class _Base(BaseModel):
    """`in_attempt`: of the rank that says it; what an earlier attempt's ranks have left unread is over."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    in_attempt: _Count


class _OfRank(_Base):
    rank: _Count


class _Started(_OfRank):
    """`error_file`: torchrun's, empty where there is none."""

    event: Literal["rank_started"]
    local_rank: _Count
    # The largest that Linux knows (proc(5), pid_max).
    pid: Annotated[int, Field(ge=1, le=2**22)]
    error_file: _Path


class _Done(_OfRank):
    event: Literal["rank_done"]


class _Preempted(_OfRank):
    event: Literal["rank_preempted"]


class _Failed(_OfRank):
    """`frame`: the innermost one of the script; `transient`: the next attempt may not meet it again."""

    event: Literal["rank_failed"]
    error: _Text
    frame: _Text | None
    transient: bool


class _StopSignal(_OfRank):
    event: Literal["stop_signal"]


class _BestModel(_Base):
    event: Literal["best_model"]
    step: _Count


_ANY: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _Started | _Done | _Preempted | _Failed | _StopSignal | _BestModel,
        Field(discriminator="event"),
    ]
)


def read(data: bytes) -> Message:
    """
    Raises:
        ValueError: it is no message that a rank sends.
    """
    message: Message = _ANY.validate_json(data).model_dump()
    return message
