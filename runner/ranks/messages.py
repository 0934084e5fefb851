"""Messages of the ranks to the runner of their node.

Any process of the same user can write to the socket, so each datagram is validated; others are dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Count = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=100_000)]
# A path is given to the system, which takes no NUL.
Path = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]


class _Message(BaseModel):
    """Base of the messages.

    Attributes:
        in_attempt: Attempt of the rank that sent it; what ranks of an earlier attempt have left unread is dropped.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)
    in_attempt: Count


class Started(_Message):
    """A rank is running.

    Attributes:
        rank: Its global rank.
        local_rank: Its rank on this node.
        pid: Its process id.
        error_file: Where torchrun's error handler writes its exception; empty if there is none.
    """

    event: Literal["rank_started"]
    rank: Count
    local_rank: Count
    # The largest that Linux allows (proc(5), pid_max).
    pid: Annotated[int, Field(ge=1, le=2**22)]
    error_file: Path


class Done(_Message):
    """A rank has finished and will exit with status 0."""

    event: Literal["rank_done"]
    rank: Count


class PreemptedRank(_Message):
    """A rank will exit because of a stop request, with everything saved."""

    event: Literal["rank_preempted"]
    rank: Count


class Failed(_Message):
    """A rank's script raised an exception.

    Attributes:
        rank: Its global rank.
        error: Type and text of the exception.
        frame: The script's innermost frame; None if the script has none in the traceback.
        transient: Whether the next attempt may not meet it.
    """

    event: Literal["rank_failed"]
    rank: Count
    error: Text
    frame: Text | None
    transient: bool


class StopSignal(_Message):
    """A rank received a stop signal of its own."""

    event: Literal["stop_signal"]
    rank: Count


class BestModelWritten(_Message):
    """The bundled job wrote its best model.

    Attributes:
        step: Step whose weights it has.
    """

    event: Literal["best_model"]
    step: Count


RankMessage = Started | Done | PreemptedRank | Failed | StopSignal | BestModelWritten
_ANY: TypeAdapter[Any] = TypeAdapter(Annotated[RankMessage, Field(discriminator="event")])


def read(data: bytes) -> RankMessage:
    """Parse a datagram.

    Raises:
        ValueError: It is not a message that a rank sends.
    """
    message: RankMessage = _ANY.validate_json(data)
    return message
