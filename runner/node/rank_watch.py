"""Heartbeats and messages of the ranks on one node."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.agent import protocol
from checkpointing.agent.protocol import Message
from runner.node import rank_messages
from runner.node.output import STDERR_NAME
from runner.node.rank_messages import RankMessage, Started
from runner.recovery.evidence import RankEnd, read_error_file, read_last_words
from runner.recovery.failure import is_effect


class RankEvents:
    """A datagram socket on which the ranks report."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "events.sock")
        # Of an earlier one in this folder: a follower whose leader was replaced makes another.
        Path(self.path).unlink(missing_ok=True)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.sock.setblocking(False)

    def receive(self) -> list[RankMessage]:
        """Return the messages that have arrived; what is not a message is dropped, as any process can write here."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self.sock.recv(protocol.MAX_MESSAGE_BYTES)
                with contextlib.suppress(ValueError):
                    messages.append(rank_messages.read(data))
        return messages

    def close(self) -> None:
        self.sock.close()


@dataclass
class RankWatch:
    """The ranks of one attempt on this node; a death is known at once, through pidfd_open(2).

    A rank that ends without having said `rank_done` has failed (`os._exit` in a script counts as that).
    """

    pidfds: dict[int, int] = field(default_factory=dict)  # pidfd → rank
    pids: dict[int, int] = field(default_factory=dict)  # rank → pid
    local_ranks: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    # Those that end in answer to a stop.
    preempted: set[int] = field(default_factory=set)
    # Error, innermost frame, and whether it may have passed by the next attempt, as ranks have said.
    errors: dict[int, tuple[str, str | None, bool]] = field(default_factory=dict)
    deaths: list[int] = field(default_factory=list)
    error_files: dict[int, str] = field(default_factory=dict)

    def started(self, message: Started) -> int | None:
        """Begin to watch a rank; returns its pidfd, or None if it has died already."""
        rank, pid = message.rank, message.pid
        self.pids[rank] = pid
        self.local_ranks[rank] = message.local_rank
        self.error_files[rank] = message.error_file
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # EINVAL: a number that is a thread's by now.
            if error.errno not in (errno.ESRCH, errno.EINVAL):
                raise
            self.deaths.append(rank)
            return None
        self.pidfds[pidfd] = rank
        return pidfd

    def died(self, pidfd: int) -> None:
        self.deaths.append(self.pidfds.pop(pidfd))
        os.close(pidfd)

    @property
    def failures(self) -> list[int]:
        """Ranks that have died and had not said that they end, the first one first."""
        return [rank for rank in self.deaths if rank not in self.done and rank not in self.preempted]

    @property
    def cause_known(self) -> bool:
        """Some rank has failed of itself: what the others would say now is its effect."""
        for rank in self.failures:
            file = Path(self.error_files.get(rank) or "/nonexistent")
            found = read_error_file(file)
            own = found or self.errors.get(rank)
            said = own[0] if own is not None else read_last_words(file.with_name(STDERR_NAME))
            if said is None or not is_effect(said):
                return True
        return False

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal all that are left; safe against reused pids."""
        for pidfd in self.pidfds:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)

    def ends(self, failures: list[Message]) -> list[RankEnd]:
        """How the failed ranks ended, from their deaths, error files, and what the launcher saw."""
        exit_codes = {int(failure["rank"]): failure["exit_code"] for failure in failures}
        files = {**{int(f["rank"]): f["error_file"] for f in failures}, **self.error_files}
        order = [rank for rank in self.deaths if rank not in self.done]
        order += [rank for rank in exit_codes if rank not in order]
        ends = []
        for position, rank in enumerate(order):
            file = Path(files.get(rank) or "/nonexistent")
            found = read_error_file(file)
            error, frame, transient = self.errors.get(rank, (None, None, False))
            if found is not None:
                ends.append(RankEnd(rank, position, exit_codes.get(rank), *found, transient=transient))
            elif error is not None:
                ends.append(RankEnd(rank, position, exit_codes.get(rank), error, frame, transient=transient))
            else:
                words = read_last_words(file.with_name(STDERR_NAME))
                ends.append(RankEnd(rank, position, exit_codes.get(rank), last_words=words))
        return ends

    def log(self, rank: int | None) -> Path | None:
        """Where a rank's standard error was kept."""
        file = self.error_files.get(rank) if rank is not None else None
        return Path(file).with_name(STDERR_NAME) if file else None

    def close(self) -> None:
        for pidfd in self.pidfds:
            os.close(pidfd)
        self.pidfds.clear()
