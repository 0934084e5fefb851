"""How a process reaches the checkpoint agent: starting one, and the rank's side of the conversation."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing import protocol
from checkpointing.arena import ControlPage, SharedMemory
from checkpointing.errors import AgentUnavailable
from checkpointing.protocol import Message

# Set by whoever starts the ranks; a rank without it starts an agent of its own.
SOCKET_ENV = "CHECKPOINT_AGENT_SOCKET"
ATTEMPT_ENV = "CHECKPOINT_ATTEMPT"


class AgentProcess:
    """A running agent that this process started."""

    def __init__(self, process: subprocess.Popen[bytes], socket_path: str, directory: Path) -> None:
        self.process = process
        self.socket_path = socket_path
        self._directory = directory

    @classmethod
    def start(
        cls,
        location: str,
        run_id: str,
        *,
        commits: bool = True,
        directory: Path | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> AgentProcess:
        """Start an agent and wait until it listens; it may first wait for an earlier agent's last commit.

        Raises:
            AgentUnavailable: it could not start, or `cancelled` became true; the message says why.
        """
        # Not the run's own directory: a socket path holds 107 bytes, and NFS holds no sockets.
        directory = directory or Path(tempfile.mkdtemp(prefix="checkpoint-agent-"))
        socket_path = str(directory / "agent.sock")
        read_fd, write_fd = os.pipe()
        arguments = ["--socket", socket_path, "--location", location, "--run-id", run_id]
        arguments += ["--ready-fd", str(write_fd)]
        if not commits:
            arguments += ["--no-commit"]
        process = subprocess.Popen(
            [sys.executable, "-m", "checkpointing.agent", *arguments],
            pass_fds=(write_fd,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            while not select.select([pipe], [], [], 0.1)[0]:
                if cancelled():
                    process.kill()
            answer = pipe.read()
        if answer != "ready":
            process.wait()
            shutil.rmtree(directory, ignore_errors=True)
            reason = answer.removeprefix("error ") or f"it ended with status {process.returncode}"
            raise AgentUnavailable(f"the checkpoint agent did not start: {reason}")
        return cls(process, socket_path, directory)

    def close(self, timeout_s: float | None = None) -> None:
        """Let it finish its commits, then reap it; killed after `timeout_s`."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class AgentClient:
    """A rank's connection. All calls are made from one thread.

    Attributes:
        control: heartbeats and the stop flag, shared with the agent and the supervisor.
    """

    def __init__(self, socket_path: str, attempt: int, rank: int, local_rank: int, local_world_size: int) -> None:
        """Connect and introduce this rank.

        Raises:
            AgentUnavailable: nobody listens, or the agent serves a newer attempt.
        """
        try:
            self._sock = protocol.connect(socket_path)
        except OSError as error:
            raise AgentUnavailable(f"no checkpoint agent at {socket_path}: {error}") from None
        self._arenas: dict[int, SharedMemory] = {}
        self._is_leader = local_rank == 0
        _, fds = self._call(
            {
                "do": "hello",
                "role": "rank",
                "attempt": attempt,
                "rank": rank,
                "local_rank": local_rank,
                "local_world_size": local_world_size,
            }
        )
        self.control = ControlPage.attach(fds[0])

    def acquire(self, step: int, nbytes: int, *, wait: bool) -> tuple[int, memoryview] | None:
        """The arena of a step: its number and bytes; None where the step is skipped because all are busy.

        The node's leader (local rank 0) says how many bytes are needed and whether to wait; its peers get the same.

        Raises:
            AgentUnavailable: the agent is gone or refuses.
        """
        reply, fds = self._call({"do": "acquire", "step": step, "nbytes": nbytes, "wait": wait})
        if reply.get("busy"):
            return None
        number = int(reply["arena"])
        for stale in self._arenas.keys() - set(reply["live"]):
            self._arenas.pop(stale).close()
        if fds:
            self._arenas[number] = SharedMemory.attach(fds[0])
        return number, self._arenas[number].buffer

    def staged(
        self,
        arena: int,
        files: Sequence[tuple[str, int, int]],
        world_size: int,
        samples_consumed: int,
        keep_last: int | None,
    ) -> None:
        """Say that this rank has copied its share. `files`: name, offset and size in bytes, of the whole snapshot."""
        message: Message = {"do": "staged", "arena": arena}
        if self._is_leader:
            message |= {"files": list(files), "world_size": world_size, "samples_consumed": samples_consumed}
            message["keep_last"] = keep_last
        self._send(message)

    def announce(self, event: Message) -> None:
        """Tell the agent's monitors something that happened on this rank."""
        self._send({"do": "announce", "event": event})

    def wait(self, step: int) -> str | None:
        """Block until the step's commit has ended; returns None on success, else why it failed."""
        reply, _ = self._call({"do": "wait", "step": step})
        return None if reply["committed"] else str(reply["error"])

    def close(self) -> None:
        self._sock.close()

    def _send(self, message: Message) -> None:
        try:
            protocol.send(self._sock, message)
        except OSError as error:
            raise AgentUnavailable(f"the checkpoint agent is gone ({error})") from None

    def _call(self, message: Message) -> tuple[Message, list[int]]:
        self._send(message)
        try:
            reply, fds = protocol.receive(self._sock)
        except OSError as error:
            raise AgentUnavailable(f"the checkpoint agent is gone ({error})") from None
        if "error" in reply and reply["error"] is not None and "committed" not in reply:
            raise AgentUnavailable(str(reply["error"]))
        return reply, fds
