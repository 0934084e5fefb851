"""How a process reaches the checkpoint agent: starting one, and the rank's side of the conversation."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path

from checkpointing.agent import protocol
from checkpointing.agent.protocol import Message
from checkpointing.errors import AgentKilled, AgentUnavailable, StorageUnreachable
from checkpointing.heartbeat import ControlPage
from checkpointing.manifest import SnapshotInfo
from checkpointing.retention import Retention
from checkpointing.shared_memory import SharedMemory
from checkpointing.stages import FIRST_STAGE, Stage
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST

# Told of the size in bytes of each file that is being fetched, and given what to ask whether all of it has arrived.
OnFetch = Callable[[dict[str, int], Callable[[], bool]], None]


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
        local_tier: str | None = None,
        local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
        commits: bool = True,
        memory_limit: int | None = None,
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
        arguments += ["--ready-fd", str(write_fd), "--parent-pid", str(os.getpid())]
        if local_tier is not None:
            arguments += ["--local-tier", local_tier, "--local-keep-last", str(local_keep_last)]
        if not commits:
            arguments += ["--no-commit"]
        if memory_limit is not None:
            arguments += ["--memory-limit", str(memory_limit)]
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
            kind = AgentKilled if process.returncode < 0 else AgentUnavailable
            raise kind(f"the checkpoint agent did not start: {reason}")
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


class Refusal(Enum):
    """Why there is no arena for a step."""

    BUSY = auto()
    NO_MEMORY = auto()


@dataclass(frozen=True)
class OfferedSnapshot:
    """A whole snapshot in the agent's memory.

    Attributes:
        info: step, attempt, world size and data cursor.
        files: each file's image, in the arena.
        digests: of each file, taken when the snapshot was made.
    """

    info: SnapshotInfo
    files: dict[str, memoryview]
    digests: dict[str, str]


class AgentClient:
    """A rank's connection. Any thread may call it.

    Attributes:
        control: heartbeats, the stop flag and the last commit, shared with the agent and the supervisor.
        directory: the agent's own, removed with it; for what this process may not live to remove.
        run_id, attempt: whose snapshots these are.
    """

    def __init__(
        self,
        socket_path: str,
        attempt: int,
        rank: int,
        local_rank: int,
        local_world_size: int,
        *,
        fetch: bool = True,
        stage: Stage = FIRST_STAGE,
        on_detach: Callable[[SharedMemory], None] = lambda _: None,
    ) -> None:
        """Connect and introduce this rank.

        Args:
            fetch: the newest checkpoint is what will be resumed from; where it is not on this machine, the agent may
                begin to read it.
            stage: which of the run's trainings this is.
            on_detach: called with every arena before it is unmapped.

        Raises:
            AgentUnavailable: nobody listens, or the agent serves a newer attempt.
        """
        try:
            self._sock = protocol.connect(socket_path)
        except OSError as error:
            raise AgentUnavailable(f"no checkpoint agent at {socket_path}: {error}") from None
        self._lock = threading.Lock()
        self._arenas: dict[int, SharedMemory] = {}
        self._is_leader = local_rank == 0
        self._on_detach = on_detach
        self._num_acquired = 0
        self.attempt = attempt
        self.directory = Path(socket_path).parent
        reply, fds = self._call(
            {
                "do": "hello",
                "role": "rank",
                "attempt": attempt,
                "rank": rank,
                "local_rank": local_rank,
                "local_world_size": local_world_size,
                "fetch": fetch,
                "stage": asdict(stage),
            }
        )
        self.run_id = str(reply["run_id"])
        self.control = ControlPage.attach(fds[0])

    def reserve(self, nbytes: int) -> None:
        """Have arenas of this size made and mapped before the first snapshot needs them."""
        reply, fds = self._call({"do": "reserve", "nbytes": nbytes})
        self._attach(reply["arenas"], fds, set(reply["live"]))
        for arena in self._arenas.values():
            arena.populate()

    def acquire(self, step: int, nbytes: int, *, wait: bool) -> tuple[int, memoryview] | Refusal:
        """The arena of a step: its number and bytes; or why the step has none.

        The node's leader (local rank 0) says how many bytes are needed and whether to wait; its peers get the same.

        Raises:
            AgentUnavailable: the agent is gone or refuses.
        """
        # All ranks ask equally often.
        self._num_acquired += 1
        request = {"do": "acquire", "step": step, "number": self._num_acquired, "nbytes": nbytes, "wait": wait}
        reply, fds = self._call(request)
        if reply.get("busy"):
            return Refusal.BUSY
        if reply.get("no_memory"):
            return Refusal.NO_MEMORY
        number = int(reply["arena"])
        self._attach([number] if fds else [], fds, set(reply["live"]))
        self._arenas[number].populate()
        return number, self._arenas[number].buffer

    def staged(
        self,
        step: int,
        arena: int,
        files: Sequence[tuple[str, int, int]],
        world_size: int,
        samples_consumed: int,
        retention: Retention,
        *,
        metrics: Mapping[str, float] | None = None,
        commit: bool = True,
    ) -> None:
        """Say that this rank has copied its share. `files`: name, offset and size in bytes, of the whole snapshot."""
        message: Message = {"do": "staged", "step": step, "arena": arena}
        if self._is_leader:
            message |= {"files": list(files), "world_size": world_size, "samples_consumed": samples_consumed}
            message |= {"retention": asdict(retention), "metrics": dict(metrics or {}), "commit": commit}
        self._send(message)

    def abandon(self, step: int, arena: int, reason: str) -> None:
        """Say that what was copied is no snapshot."""
        self._send({"do": "abandon", "step": step, "arena": arena, "reason": reason})

    def offer(self, on_fetch: OnFetch = lambda sizes, arrived: None) -> tuple[list[OfferedSnapshot], bool]:
        """Whole snapshots that the agent still holds; and whether the durable tier can be reached.

        Args:
            on_fetch: called while the agent reads a checkpoint into memory.

        Raises:
            StorageUnreachable: nothing can be reached.
        """
        reply, fds = self._call({"do": "offer"})
        while "fetching" in reply:
            self._map(reply["arenas"], fds)
            on_fetch({name: nbytes for name, _, nbytes in reply["fetching"]}, self._has_answer)
            reply, fds = self._receive()
        if "storage_error" in reply:
            raise StorageUnreachable(reply["storage_error"])
        self._map(reply["arenas"], fds)
        offered = []
        for snapshot in reply["snapshots"]:
            files, buffer = snapshot.pop("files"), self._arenas[snapshot.pop("arena")].buffer
            offered.append(
                OfferedSnapshot(
                    SnapshotInfo(**snapshot),
                    {name: buffer[offset : offset + nbytes] for name, offset, nbytes, _ in files},
                    {name: digest for name, _, _, digest in files},
                )
            )
        return offered, reply["unreachable"] is None

    def discard(self, step: int, reason: str) -> None:
        """Say that an offered snapshot does not have its digest."""
        self._send({"do": "discard", "step": step, "reason": reason})

    def prune(self, retention: Retention) -> None:
        """Have old checkpoints removed and new ones uploaded, after a commit that the agent did not make."""
        self._send({"do": "prune", "retention": asdict(retention)})

    def announce(self, event: Message) -> None:
        """Tell the agent's monitors something that happened on this rank."""
        self._send({"do": "announce", "event": event})

    def wait(self, step: int) -> str | None:
        """Block until the step's commit has ended; returns None on success, else why it failed."""
        reply, _ = self._call({"do": "wait", "step": step})
        return None if reply["committed"] else str(reply["error"])

    def close(self) -> None:
        for memory in self._arenas.values():
            self._on_detach(memory)
        self._sock.close()

    def _send(self, message: Message) -> None:
        try:
            protocol.send(self._sock, message)
        except OSError as error:
            raise AgentUnavailable(f"the checkpoint agent is gone ({error})") from None

    def _attach(self, numbers: Sequence[int], fds: Sequence[int], live: set[int] | None) -> None:
        for number, fd in zip(numbers, fds, strict=True):
            self._arenas[number] = SharedMemory.attach(fd)
        for stale in self._arenas.keys() - live if live is not None else set():
            self._on_detach(self._arenas[stale])
            self._arenas.pop(stale).close()

    def _map(self, numbers: Sequence[int], fds: Sequence[int]) -> None:
        """Attach arenas that are about to be read: a page fault for each page would cost more than reading it."""
        self._attach(numbers, fds, None)
        for number in numbers:
            self._arenas[number].populate()

    def _has_answer(self) -> bool:
        return bool(select.select([self._sock], [], [], 0)[0])

    def _call(self, message: Message) -> tuple[Message, list[int]]:
        with self._lock:
            self._send(message)
            return self._receive()

    def _receive(self) -> tuple[Message, list[int]]:
        try:
            reply, fds = protocol.receive(self._sock)
        except OSError as error:
            raise AgentUnavailable(f"the checkpoint agent is gone ({error})") from None
        if "error" in reply and reply["error"] is not None and "committed" not in reply:
            raise AgentUnavailable(str(reply["error"]))
        return reply, fds
