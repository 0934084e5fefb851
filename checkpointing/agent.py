"""The checkpoint agent: one process per node that owns the snapshot arenas and writes, digests, commits and prunes.

It outlives the ranks: a snapshot that was whole when its trainer died is committed all the same. No torch here.

    python -m checkpointing.agent --socket PATH --location DIR --run-id ID [--no-commit] --ready-fd FD

Clients speak `checkpointing.protocol` over the socket. A rank says `hello`, then for each snapshot `acquire`, `staged`,
and where it must know the outcome `wait`. A monitor (the supervisor) says `hello`, `begin_attempt`, `request_stop`,
`drain`, `shutdown`, and is told every event. When the last monitor goes, or on SIGTERM, the agent commits the whole
snapshots it still holds and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from checkpointing import protocol
from checkpointing.arena import ControlPage, SharedMemory
from checkpointing.catalog import Catalog
from checkpointing.commit import SnapshotInfo, StagedFile, commit_snapshot
from checkpointing.errors import CheckpointError
from checkpointing.protocol import Message
from checkpointing.retention import steps_to_remove
from checkpointing.storage import LocalStorage, Storage, open_storage

NUM_ARENAS = 2
LOCK_NAME = ".agent.lock"
# How long a new agent waits for the one before it to finish its last commit.
LOCK_TIMEOUT_S = 120.0
_GROWTH_SHARE = 64
_GROWTH_BYTES = 4 * 1024 * 1024
_NICENESS = 5
_PR_SET_PDEATHSIG = 1


class ArenaState(Enum):
    """FREE → FILLING (ranks copy) → READY (queued or being written) → FREE."""

    FREE = auto()
    FILLING = auto()
    READY = auto()


@dataclass
class Arena:
    """One buffer that holds one snapshot at a time."""

    number: int
    memory: SharedMemory
    state: ArenaState = ArenaState.FREE
    step: int = -1
    copied_by: set[int] = field(default_factory=set)
    info: SnapshotInfo | None = None
    files: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass
class Client:
    """A connected process. `rank` is its local rank, None for a monitor or before its hello."""

    sock: socket.socket
    is_monitor: bool = False
    local_rank: int | None = None
    local_world_size: int = 1
    attempt: int = -1
    sent_arenas: set[int] = field(default_factory=set)
    waits_for_arena: Message | None = None
    waits_for_step: int | None = None
    waits_for_drain: bool = False


class Agent:
    """The event loop. One thread owns all state; a second one does nothing but commit."""

    def __init__(
        self,
        listener: socket.socket,
        storage: Storage,
        run_id: str,
        commits: bool = True,
    ) -> None:
        self._listener = listener
        self._storage = storage
        self._run_id = run_id
        self._keep_last: int | None = None
        self._commits = commits
        self._control = ControlPage.create()
        self._attempt = -1
        self._arenas: list[Arena] = []
        self._next_arena_number = 0
        # The leader's latest decision: a step, and its arena or None where it is skipped.
        self._decided: tuple[int, Arena | None] | None = None
        self._outcomes: dict[int, Message] = {}
        self._clients: dict[socket.socket, Client] = {}
        self._had_monitor = False
        self._stopping = False
        self._work: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        self._results: deque[tuple[Arena | None, Message]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    def stop(self) -> None:
        """Finish the snapshots that are whole, then return from `run`. Safe in a signal handler."""
        self._stopping = True
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"x")

    def run(self) -> None:
        writer = threading.Thread(target=self._write_loop, name="checkpoint-writer", daemon=True)
        writer.start()
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not (self._stopping and not self._busy()):
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_receiver:
                        self._handle_wakeup()
                    else:
                        client = self._clients.get(key.fileobj)  # type: ignore[call-overload]
                        if client is not None:
                            self._receive(client)
                if self._stopping:
                    self._drop_unfinished()
        self._work.put(None)
        writer.join()

    # -- connections ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._clients[sock] = Client(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, client: Client) -> None:
        try:
            message, fds = protocol.receive(client.sock)
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(client)
            return
        for fd in fds:
            os.close(fd)
        self._handle(client, message)

    def _disconnect(self, client: Client) -> None:
        if self._clients.pop(client.sock, None) is None:
            return
        self._selector.unregister(client.sock)
        client.sock.close()
        if self._had_monitor and not any(other.is_monitor for other in self._clients.values()):
            self._stopping = True

    def _reply(self, client: Client, message: Message, fds: tuple[int, ...] = ()) -> None:
        try:
            protocol.send(client.sock, message, fds)
        except OSError:
            self._disconnect(client)

    def _publish(self, event: Message) -> None:
        for client in [client for client in self._clients.values() if client.is_monitor]:
            self._reply(client, event)

    # -- requests ------------------------------------------------------------------------------------------------

    def _handle(self, client: Client, message: Message) -> None:
        match message.get("do"):
            case "hello":
                self._hello(client, message)
            case "acquire":
                self._acquire(client, message)
            case "staged":
                self._staged(client, message)
            case "wait":
                client.waits_for_step = int(message["step"])
                self._answer_waiting()
            case "announce":
                self._publish(message["event"])
            case "begin_attempt":
                self._begin_attempt(int(message["attempt"]))
                self._reply(client, {"event": "attempt_begun", "attempt": self._attempt})
            case "request_stop":
                self._control.stop_requested = True
            case "drain":
                # Ranks that have died may have left messages unread; they come before the answer.
                self._read_pending()
                self._drop_unfinished()
                client.waits_for_drain = True
                self._answer_waiting()
            case "shutdown":
                self._stopping = True
            case unknown:
                self._reply(client, {"error": f"unknown request {unknown!r}"})

    def _hello(self, client: Client, message: Message) -> None:
        if message["role"] == "monitor":
            client.is_monitor = self._had_monitor = True
        else:
            if message["attempt"] < self._attempt:
                self._reply(client, {"error": f"attempt {message['attempt']} is over; {self._attempt} runs now"})
                return
            if message["attempt"] > self._attempt:
                self._begin_attempt(message["attempt"])
            client.attempt = message["attempt"]
            client.local_rank = message["local_rank"]
            client.local_world_size = message["local_world_size"]
        self._reply(client, {"ok": True, "pid": os.getpid()}, (self._control.fd,))

    def _begin_attempt(self, attempt: int) -> None:
        if attempt <= self._attempt:
            return
        self._drop_unfinished()
        self._attempt = attempt
        self._decided = None
        self._outcomes.clear()
        self._control.stop_requested = False
        self._control.clear()

    def _acquire(self, client: Client, message: Message) -> None:
        """Give the arena of a step. The node's leader knows the size and so decides; its peers follow."""
        if client.local_rank is None or client.attempt != self._attempt:
            self._reply(client, {"error": "this attempt is over"})
            return
        step = int(message["step"])
        if client.local_rank == 0:
            try:
                arena = self._free_arena(int(message["nbytes"]))
            except OSError as error:
                self._reply(client, {"error": f"no memory for a snapshot: {error.strerror}"})
                return
            if arena is None and message["wait"]:
                client.waits_for_arena = message
                return
            self._decided = (step, arena)
            if arena is None:
                self._publish({"event": "snapshot_skipped", "step": step, "reason": "all arenas are being written"})
            else:
                arena.state, arena.step = ArenaState.FILLING, step
                arena.copied_by.clear()
        elif self._decided is None or self._decided[0] != step:
            client.waits_for_arena = message
            return
        arena = self._decided[1]
        if arena is None:
            self._reply(client, {"busy": True})
        else:
            fds = () if arena.number in client.sent_arenas else (arena.memory.fd,)
            client.sent_arenas.add(arena.number)
            self._reply(client, {"arena": arena.number, "live": [other.number for other in self._arenas]}, fds)
        if client.local_rank == 0:
            self._answer_waiting()

    def _free_arena(self, nbytes: int) -> Arena | None:
        """A free arena of enough bytes; grows up to `NUM_ARENAS` of them on demand."""
        free = [arena for arena in self._arenas if arena.state is ArenaState.FREE]
        fitting = [arena for arena in free if arena.memory.nbytes >= nbytes]
        if fitting:
            return fitting[0]
        if len(self._arenas) >= NUM_ARENAS:
            if not free:
                return None
            self._arenas.remove(free[0])
            free[0].memory.close()
        # The log history grows with every save; without some air, so would the arena, all of it anew each time.
        capacity = nbytes + max(nbytes // _GROWTH_SHARE, _GROWTH_BYTES)
        arena = Arena(self._next_arena_number, SharedMemory.create("checkpoint-arena", capacity))
        self._next_arena_number += 1
        self._arenas.append(arena)
        return arena

    def _staged(self, client: Client, message: Message) -> None:
        arena = next((a for a in self._arenas if a.number == message["arena"]), None)
        if arena is None or arena.state is not ArenaState.FILLING or client.attempt != self._attempt:
            return
        assert client.local_rank is not None
        arena.copied_by.add(client.local_rank)
        if client.local_rank == 0:
            arena.files = [(name, int(offset), int(nbytes)) for name, offset, nbytes in message["files"]]
            self._keep_last = message["keep_last"]
            arena.info = SnapshotInfo(
                run_id=self._run_id,
                attempt=client.attempt,
                step=arena.step,
                world_size=int(message["world_size"]),
                samples_consumed=int(message["samples_consumed"]),
            )
        if len(arena.copied_by) == client.local_world_size:
            self._publish({"event": "snapshot", "step": arena.step})
            if self._commits:
                arena.state = ArenaState.READY
                self._work.put(arena)
            else:
                arena.state = ArenaState.FREE
                self._outcomes[arena.step] = {"committed": True}
                self._answer_waiting()

    # -- progress ------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return any(arena.state is ArenaState.READY for arena in self._arenas)

    def _read_pending(self) -> None:
        for client in list(self._clients.values()):
            while not client.is_monitor and client.sock in self._clients:
                try:
                    message, fds = protocol.receive(client.sock)
                except BlockingIOError:
                    break
                except OSError:
                    self._disconnect(client)
                    break
                for fd in fds:
                    os.close(fd)
                self._handle(client, message)

    def _drop_unfinished(self) -> None:
        """Forget snapshots that some rank will never finish."""
        for arena in self._arenas:
            if arena.state is ArenaState.FILLING:
                self._publish({"event": "snapshot_dropped", "step": arena.step})
                arena.state = ArenaState.FREE

    def _answer_waiting(self) -> None:
        for client in list(self._clients.values()):
            if client.waits_for_arena is not None:
                message, client.waits_for_arena = client.waits_for_arena, None
                self._acquire(client, message)
            if client.waits_for_step is not None and client.waits_for_step in self._outcomes:
                step, client.waits_for_step = client.waits_for_step, None
                self._reply(client, self._outcomes[step])
            if client.waits_for_drain and not self._busy():
                client.waits_for_drain = False
                self._reply(client, {"event": "drained"})

    def _handle_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        while self._results:
            arena, event = self._results.popleft()
            self._publish(event)
            if arena is not None:
                arena.state = ArenaState.FREE
                self._outcomes[arena.step] = {
                    "committed": event["event"] == "committed",
                    "error": event.get("error"),
                }
        self._answer_waiting()

    # -- the writer thread ---------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        while (arena := self._work.get()) is not None:
            try:
                event = self._commit(arena)
            except Exception as error:
                # Whatever it was, the run must learn of it and the arena must become free again.
                event = {
                    "event": "commit_failed",
                    "step": arena.step,
                    "error": f"{type(error).__name__}: {error}",
                }
            self._tell(arena, event)
            if event["event"] == "committed":
                try:
                    for step in steps_to_remove(Catalog(self._storage).committed_steps(), self._keep_last):
                        self._storage.remove(step)
                        self._tell(None, {"event": "pruned", "step": step})
                except OSError as error:
                    self._tell(None, {"event": "prune_failed", "error": str(error)})

    def _commit(self, arena: Arena) -> Message:
        assert arena.info is not None
        started = time.monotonic()
        buffer = arena.memory.buffer
        files = [StagedFile(name, buffer[offset : offset + nbytes]) for name, offset, nbytes in arena.files]
        try:
            manifest = commit_snapshot(self._storage, arena.info, files)
        except CheckpointError as error:
            return {"event": "commit_failed", "step": arena.step, "error": str(error)}
        return {
            "event": "committed",
            "step": arena.step,
            "attempt": arena.info.attempt,
            "nbytes": manifest.total_bytes,
            "duration_s": round(time.monotonic() - started, 4),
        }

    def _tell(self, arena: Arena | None, event: Message) -> None:
        self._results.append((arena, event))
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"x")


def acquire_lock(root: Path, timeout_s: float) -> int:
    """Become the only agent of a location; the lock lives as long as the returned descriptor.

    Raises:
        TimeoutError: another agent kept it.
        OSError: the directory cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(fd, 100, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise TimeoutError(
                    f"another checkpoint agent ({holder}) has held {root} for {timeout_s:.0f} s; "
                    "stop that run, or choose another output_dir"
                ) from None
            time.sleep(0.05)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return fd


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checkpointing.agent", description="Checkpoint agent of one node.")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--location", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--no-commit", action="store_true", help="hold snapshots only; another node commits")
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args(argv)

    # A parent that dies without a word must not take uncommitted snapshots with it: drain, then end.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)

    def report(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(arguments.ready_fd, text.encode())
        os.close(arguments.ready_fd)

    try:
        storage = open_storage(arguments.location)
        if isinstance(storage, LocalStorage) and not arguments.no_commit:
            acquire_lock(storage.root, LOCK_TIMEOUT_S)
            storage.sweep()
        listener = protocol.listen(arguments.socket)
    except (OSError, ValueError) as error:
        report(f"error {error}")
        return 1
    agent = Agent(listener, storage, arguments.run_id, commits=not arguments.no_commit)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    report("ready")
    agent.run()
    with contextlib.suppress(OSError):
        Path(arguments.socket).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
