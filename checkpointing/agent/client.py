"""How a process uses the checkpoint agent: starting one, and the rank's side of the conversation."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from checkpointing.agent import protocol
from checkpointing.agent.events import Event
from checkpointing.agent.options import EXIT_DELAYED, AgentOptions
from checkpointing.agent.protocol import Guest, Message, Refusal
from checkpointing.commit.replicated_save import ReplicatedSave
from checkpointing.commit.retention import Retention
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.commit.tiers import FIRST_STAGE, TrainingStage
from checkpointing.errors import AgentDelayed, AgentUnavailable, StorageUnreachable, may_pass
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import shard_rank
from checkpointing.host.heartbeat import ControlPage
from checkpointing.host.interpreter import module_command
from checkpointing.host.limits import explained
from checkpointing.host.shared_memory import SharedMemory
from checkpointing.host.threads import is_readable

# Called with the size in bytes of each file that is being fetched, and a function that tells whether all have arrived.
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
        options: AgentOptions,
        *,
        directory: Path | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> AgentProcess:
        """Start an agent and wait until it listens; it may first wait for an earlier agent's last commit.

        Args:
            options: What the agent is to do.
            directory: Folder for its socket, which `close` removes; None for a new one.
            cancelled: Asked while it starts; once true, the agent is killed.

        Returns:
            The running agent.

        Raises:
            AgentUnavailable: It could not start, or was cancelled; the message says why.
            AgentDelayed: It may start later.
        """
        # Not the run's own directory: a socket path has at most 107 bytes, and NFS has no sockets.
        directory = directory or Path(tempfile.mkdtemp(prefix="checkpoint-agent-"))
        socket_path = str(directory / "agent.sock")
        read_fd, write_fd = os.pipe()
        arguments = ["--options", options.to_json(), "--socket", socket_path]
        arguments += ["--ready-fd", str(write_fd), "--parent-pid", str(os.getpid())]
        try:
            process = subprocess.Popen(
                module_command("checkpointing.agent", *arguments),
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_fd)
            shutil.rmtree(directory, ignore_errors=True)
            kind = AgentDelayed if may_pass(error) else AgentUnavailable
            raise kind(f"the checkpoint agent did not start: {error}{explained(str(error))}") from None
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            while not is_readable(pipe, 0.1):
                if cancelled():
                    process.kill()
            answer = pipe.read()
        if answer != "ready":
            process.wait()
            shutil.rmtree(directory, ignore_errors=True)
            reason = answer.removeprefix("error ") or f"it ended with status {process.returncode}"
            is_delayed = process.returncode < 0 or process.returncode == EXIT_DELAYED
            kind = AgentDelayed if is_delayed else AgentUnavailable
            raise kind(f"the checkpoint agent did not start: {reason}")
        return cls(process, socket_path, directory)

    def close(self, timeout_s: float | None = None) -> None:
        """Let the agent finish its commits, and reap it; kill it after `timeout_s`."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


@dataclass(frozen=True)
class OfferedSnapshot:
    """A whole snapshot in the agent's memory.

    Attributes:
        info: Step, attempt, world size and data cursor.
        files: The image of each file, in the arena, by name.
        digests: The digest of each file, computed when the snapshot was made, by name.
        prepare: Makes its memory ready for reading.
        save: Identity of the save, where this is only the node's share of a state, with copies of another node's.
    """

    info: SnapshotInfo
    files: dict[str, memoryview]
    digests: dict[str, str]
    prepare: Callable[[], None] = lambda: None
    save: str | None = None

    def without_shards(self) -> OfferedSnapshot:
        """Return what every node that holds a share has of it."""
        files = {name: view for name, view in self.files.items() if shard_rank(name) is None}
        return replace(self, files=files)


@dataclass(frozen=True)
class Offered:
    """What a rank may resume from, as far as its node's agent knows.

    Attributes:
        snapshots: Those in the agent's memory.
        is_reachable: The durable tier can be reached.
        saving: The newest step of which a share is being saved, which might become a checkpoint; or -1.
    """

    snapshots: list[OfferedSnapshot]
    is_reachable: bool = True
    saving: int = -1


class AgentClient:
    """A rank's connection. Any thread may call it.

    Attributes:
        control: Heartbeats, the stop flag and the last commit, shared with the agent and the supervisor.
        directory: The agent's own, removed with it: for files that this process may not live to remove.
        run_id: The run that the snapshots belong to.
        attempt: The attempt that they belong to.
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
        stage: TrainingStage = FIRST_STAGE,
        on_read: Callable[[SharedMemory], None] = lambda _: None,
        on_reserved: Callable[[SharedMemory], None] = lambda _: None,
        on_detach: Callable[[SharedMemory], None] = lambda _: None,
    ) -> None:
        """Connect and introduce this rank.

        Args:
            socket_path: The agent's socket.
            attempt: Number of the attempt.
            rank: This rank, of all nodes.
            local_rank: This rank, of this node; 0 is the node's leader.
            local_world_size: Ranks of this node.
            fetch: Whether the newest checkpoint is what will be resumed from: if it is not on this machine, the agent
                may begin to read it.
            stage: The run's stage that this is.
            on_read: Called with an arena before a snapshot in it is read.
            on_reserved: Called with each arena that was made before the first snapshot.
            on_detach: Called with every arena before it is unmapped.

        Raises:
            AgentUnavailable: No agent listens, or it serves a newer attempt.
        """
        try:
            self._sock = protocol.connect(socket_path)
        except OSError as error:
            raise AgentUnavailable(f"no checkpoint agent at {socket_path}: {error}") from None
        self._lock = threading.Lock()
        self._arenas: dict[int, SharedMemory] = {}
        self._is_leader = local_rank == 0
        self._on_read, self._on_reserved, self._on_detach = on_read, on_reserved, on_detach
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
        # This rank's step record, as it was before this attempt.
        self.step_ring = SharedMemory.attach(fds[1])

    def reserve(self, nbytes: int, guests: int = 0) -> bool:
        """Have arenas of this size allocated and mapped before the first snapshot needs them.

        Args:
            nbytes: Size of a snapshot.
            guests: Bytes more, for copies of another node's shards.

        Returns:
            Whether there is memory for these, too.
        """
        reply, fds = self._call({"do": "reserve", "nbytes": nbytes, "guests": guests})
        self._attach(reply["arenas"], fds, set(reply["live"]))
        for arena in self._arenas.values():
            arena.populate()
            self._on_reserved(arena)
        return bool(reply["has_room"])

    def acquire(
        self, step: int, nbytes: int, *, wait: bool, is_urgent: bool = False
    ) -> tuple[int, memoryview] | Refusal:
        """Request the arena of a step. All ranks request equally often, and get the same one.

        Args:
            step: The step.
            nbytes: Bytes that are needed; the value of the node's leader (local rank 0) counts.
            wait: Whether to wait until an arena is free; the leader's value counts.
            is_urgent: The same for overwriting a snapshot although other nodes have no copies of the next one yet.

        Returns:
            The arena's number and bytes; or why the step has none.

        Raises:
            AgentUnavailable: The agent is gone or refuses.
        """
        self._num_acquired += 1
        request: Message = {"do": "acquire", "step": step, "number": self._num_acquired, "nbytes": nbytes}
        reply, fds = self._call({**request, "wait": wait, "urgent": is_urgent})
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
        save: ShardedSave | ReplicatedSave | None = None,
        receives: bool = False,
        words: tuple[int, int] | None = None,
        not_finite: Sequence[str] = (),
    ) -> None:
        """Report that this rank has copied its share of a snapshot.

        Args:
            step: Step of the snapshot.
            arena: Number of its arena.
            files: Name, offset and size in bytes of each file image of the whole snapshot.
            world_size: Number of ranks.
            samples_consumed: The data cursor.
            retention: Checkpoints that the durable tier keeps from now on.
            metrics: Measurements of this step.
            commit: Whether the snapshot is to be committed.
            save: The save, where several nodes write the checkpoint.
            receives: This rank is about to receive a copy of another node's shard; then `received` must follow.
            words: Sum of the words that it has copied, of their source, and their size in bytes; None if not known.
            not_finite: Names of tensors that hold NaN or infinity: nothing resumes from the snapshot.
        """
        message: Message = {"do": "staged", "step": step, "arena": arena, "receives": receives, "words": words}
        message["not_finite"] = list(not_finite)
        if self._is_leader:
            message |= {"files": list(files), "world_size": world_size, "samples_consumed": samples_consumed}
            message |= {"retention": asdict(retention), "metrics": dict(metrics or {}), "commit": commit}
            message["save"] = asdict(save) if save is not None else None
        self._send(message)

    def received(self, step: int, arena: int, guest: Guest | None) -> None:
        """Report that this rank has put a copy of another node's shard into an arena; None if it has not come."""
        self._send({"do": "received", "step": step, "arena": arena, "guest": asdict(guest) if guest else None})

    def abandon(self, step: int, arena: int, reason: str) -> None:
        """Report that the copied bytes are not a valid snapshot."""
        self._send({"do": "abandon", "step": step, "arena": arena, "reason": reason})

    def offer(self, on_fetch: OnFetch = lambda sizes, arrived: None, *, settled: bool = True) -> Offered:
        """Ask for the whole snapshots that the agent still holds, and this node's shares of others.

        Args:
            on_fetch: Called while the agent reads a checkpoint into memory.
            settled: Wait until no share is being saved.

        Raises:
            StorageUnreachable: No tier can be reached.
        """
        reply, fds = self._call({"do": "offer", "settled": settled})
        while "fetching" in reply:
            self._attach(reply["arenas"], fds, None)
            sizes = {name: nbytes for name, _, nbytes in reply["fetching"]}
            on_fetch(sizes, lambda: is_readable(self._sock, 0))
            reply, fds = self._receive()
        if "storage_error" in reply:
            raise StorageUnreachable(reply["storage_error"])
        self._attach(reply["arenas"], fds, None)
        offered = []
        for snapshot in reply["snapshots"]:
            files, arena = snapshot.pop("files"), self._arenas[snapshot.pop("arena")]
            buffer, save = arena.buffer, snapshot.pop("save")
            offered.append(
                OfferedSnapshot(
                    SnapshotInfo(**snapshot),
                    {name: buffer[offset : offset + nbytes] for name, offset, nbytes, _ in files},
                    {name: digest for name, _, _, digest in files},
                    functools.partial(self._on_read, arena),
                    save,
                )
            )
        return Offered(offered, reply["unreachable"] is None, int(reply["saving"]))

    def discard(self, step: int, reason: str, *, damaged: bool = True) -> None:
        """Report that an offered snapshot does not have its digest, or why else it is not to be offered again."""
        self._send({"do": "discard", "step": step, "reason": reason, "damaged": damaged})

    def prune(self, retention: Retention) -> None:
        """Have old checkpoints removed and new ones uploaded, after a commit that this rank made itself."""
        self._send({"do": "prune", "retention": asdict(retention)})

    def announce(self, event: Event) -> None:
        """Report an event of this rank to the agent's monitors."""
        self._send({"do": "announce", "event": event.to_dict()})

    def wait(self, step: int) -> str | None:
        """Block until the step's commit has ended; return None on success, otherwise why it failed."""
        reply, _ = self._call({"do": "wait", "step": step})
        return None if reply["committed"] else str(reply["error"])

    def close(self) -> None:
        """Disconnect; the arenas stay mapped while they are in use."""
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
