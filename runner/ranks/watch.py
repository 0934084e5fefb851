"""The ranks of an attempt on one node: their messages, deaths and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from checkpointing.agent import protocol
from checkpointing.agent.protocol import Message
from runner.ranks.output import STDERR_NAME
from runner.recovery.classify import RankEnd, raised_by_program, read_error_file, read_last_words
from runner.recovery.failure import is_effect

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, Field(max_length=100_000)]
# It is given to the system, which takes no NUL.
_PathText = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]


class _Message(BaseModel):
    """A message of a rank; what ranks of an earlier attempt have left unread is dropped, by `in_attempt`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)
    in_attempt: _Count


class Started(_Message):
    """A rank is running; to `error_file`, unless empty, torchrun's error handler writes its exception."""

    event: Literal["rank_started"]
    rank: _Count
    local_rank: _Count
    # The largest that Linux allows (proc(5), pid_max).
    pid: Annotated[int, Field(ge=1, le=2**22)]
    error_file: _PathText


class Done(_Message):
    """A rank has finished and will exit with status 0."""

    event: Literal["rank_done"]
    rank: _Count


class PreemptedRank(_Message):
    """A rank will exit because of a stop request, with everything saved."""

    event: Literal["rank_preempted"]
    rank: _Count


class Failed(_Message):
    """A rank's script raised an exception.

    Attributes:
        frame: The script's innermost frame; None if the script has none in the traceback.
        transient: Whether the next attempt may not meet it.
    """

    event: Literal["rank_failed"]
    rank: _Count
    error: _Text
    frame: _Text | None
    transient: bool


class StopSignal(_Message):
    """A rank received a stop signal of its own."""

    event: Literal["stop_signal"]
    rank: _Count


class BestModelWritten(_Message):
    """The bundled job wrote its best model, with the weights of this step."""

    event: Literal["best_model"]
    step: _Count


class UnprotectedProgram(_Message):
    """A program trains, and nothing of it is saved."""

    event: Literal["unprotected"]
    rank: _Count
    reason: _Text


class Working(_Message):
    """What the first rank of the bundled job does before its first step."""

    event: Literal["working"]
    rank: _Count
    what: Annotated[str, Field(max_length=100)]


class ProgramSteps(_Message):
    """An optimizer of a program has taken its first step."""

    event: Literal["program_steps"]
    rank: _Count


class ProgramCheckpoint(_Message):
    """What a program's own `torch.distributed.checkpoint` has saved, loaded or found damaged: an event, as a dict."""

    event: Literal["program_checkpoint"]
    rank: _Count
    report: dict[str, Any]


RankMessage = (
    Started
    | Done
    | PreemptedRank
    | Failed
    | StopSignal
    | BestModelWritten
    | UnprotectedProgram
    | ProgramSteps
    | ProgramCheckpoint
    | Working
)
_ANY_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(Annotated[RankMessage, Field(discriminator="event")])


class RankEvents:
    """A datagram socket on which the ranks report, at `path`, and which does not block.

    Any process of the same user can write to it, so each datagram is validated; others are dropped.
    """

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "events.sock")
        # A follower whose leader was replaced opens another one in the same folder.
        Path(self.path).unlink(missing_ok=True)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.sock.setblocking(False)

    def receive(self) -> list[RankMessage]:
        """Return the messages that have arrived."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self.sock.recv(protocol.MAX_MESSAGE_BYTES)
                with contextlib.suppress(ValueError):
                    messages.append(_ANY_MESSAGE.validate_json(data))
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


@dataclass
class RankWatch:
    """The ranks of one attempt on this node; a death is noticed at once, through pidfd_open(2).

    A rank that ends without a `rank_done` message has failed; so has a script that calls `os._exit`.

    Attributes:
        pidfds: Ranks that are running, by their pidfds.
        pids: Process ids of all ranks that have started, by rank.
        local_ranks: Their ranks on this node, by rank.
        done: Ranks that have finished.
        preempted: Ranks that exit because of a stop request.
        errors: By rank, what it reported: the error, its innermost frame, whether it is transient.
        deaths: Ranks that have died, the first one first.
        error_files: Paths of torchrun's error files, by rank.
    """

    pidfds: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    local_ranks: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    preempted: set[int] = field(default_factory=set)
    errors: dict[int, tuple[str, str | None, bool]] = field(default_factory=dict)
    deaths: list[int] = field(default_factory=list)
    error_files: dict[int, str] = field(default_factory=dict)

    def started(self, message: Started) -> int | None:
        """Begin to watch a rank; return its pidfd, or None if it has died already."""
        rank, pid = message.rank, message.pid
        self.pids[rank] = pid
        self.local_ranks[rank] = message.local_rank
        self.error_files[rank] = message.error_file
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # EINVAL means that the number belongs to a thread by now.
            if error.errno not in (errno.ESRCH, errno.EINVAL):
                raise
            self.deaths.append(rank)
            return None
        self.pidfds[pidfd] = rank
        return pidfd

    def died(self, pidfd: int) -> None:
        """Record the death of a rank, and close its pidfd."""
        self.deaths.append(self.pidfds.pop(pidfd))
        os.close(pidfd)

    @property
    def failures(self) -> list[int]:
        """Ranks that have died without announcing their end, the first one first."""
        return [rank for rank in self.deaths if rank not in self.done and rank not in self.preempted]

    @property
    def cause_known(self) -> bool:
        """Whether some rank has failed by itself, so that errors of the others are effects of it."""
        ends = [self._end(rank, 0, None, self.error_files.get(rank)) for rank in self.failures]
        errors = [end.last_words if end.error is None else end.error for end in ends]
        return any(error is None or not is_effect(error) for error in errors)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all running ranks; a pidfd cannot hit a process that reuses a pid."""
        for pidfd in self.pidfds:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)

    def ends(self, failures: list[Message]) -> list[RankEnd]:
        """Return how the failed ranks ended, from their deaths, error files, messages and the launcher's report."""
        exit_codes = {int(failure["rank"]): failure["exit_code"] for failure in failures}
        files = {**{int(f["rank"]): f["error_file"] for f in failures}, **self.error_files}
        order = [rank for rank in self.deaths if rank not in self.done]
        order += [rank for rank in exit_codes if rank not in order]
        return [self._end(rank, place, exit_codes.get(rank), files.get(rank)) for place, rank in enumerate(order)]

    def _end(self, rank: int, order: int, exit_code: int | None, error_file: str | None) -> RankEnd:
        file = Path(error_file or "/nonexistent")
        found = read_error_file(file)
        error, frame, transient = self.errors.get(rank, (None, None, False))
        if found is None and error is not None:
            found = error, frame, None
        if found is not None:
            said = raised_by_program(found[0], found[1], file)
            return RankEnd(rank, order, exit_code, *found, raised_by_program=said, transient=transient)
        return RankEnd(rank, order, exit_code, last_words=read_last_words(file.with_name(STDERR_NAME)))

    def log(self, rank: int | None) -> Path | None:
        """Return the file with a rank's standard error; None if there is none."""
        file = self.error_files.get(rank) if rank is not None else None
        return Path(file).with_name(STDERR_NAME) if file else None

    def close(self) -> None:
        """Close the descriptors."""
        for pidfd in self.pidfds:
            os.close(pidfd)
        self.pidfds.clear()
