"""The checkpoint agent: one process per node that owns the snapshot arenas and writes, digests, commits and prunes.

It outlives the ranks: a snapshot that was whole when its trainer died is committed all the same. No torch here.

    python -m checkpointing.agent --socket PATH --location DIR --run-id ID --ready-fd FD [options]

Clients speak `checkpointing.protocol` over the socket. A rank says `hello`, asks for an `offer` of snapshots to resume
from, then for each snapshot says `acquire`, `staged` (or `abandon`), and where it must know the outcome `wait`. A
monitor (the supervisor) says `hello`, `begin_attempt`, `request_stop`, `end_attempt`, `shutdown`, and is told every
event. When the last monitor goes, or on SIGTERM, the agent commits the newest whole snapshot and ends.

A snapshot stays in its arena after it was committed, until the room is needed: an attempt that dies goes on from it
without reading storage. One whole snapshot is always kept while the next one is being made, wherever there is memory
for two.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Literal

import psutil

from checkpointing import protocol
from checkpointing.arena import CommitReport, ControlPage, SharedMemory, round_up
from checkpointing.catalog import Catalog
from checkpointing.commit import SnapshotInfo, StagedFile, commit_snapshot
from checkpointing.digest import digest_buffer
from checkpointing.errors import CheckpointError, Fenced
from checkpointing.memory import DEFAULT_SHARE, available_bytes
from checkpointing.protocol import Message
from checkpointing.retention import steps_to_remove
from checkpointing.storage import LocalStorage, Storage, open_storage

NUM_ARENAS = 2
LOCK_NAME = ".agent.lock"
# How long a new agent waits for the one before it to finish its last commit.
LOCK_TIMEOUT_S = 120.0
_GROWTH_SHARE = 64
_GROWTH_BYTES = 4 * 1024 * 1024
_NICENESS = 10
# Lowest of the best-effort class (ioprio_set(2)).
_IO_PRIORITY = 7
_PR_SET_PDEATHSIG = 1


class ArenaState(Enum):
    """FREE → FILLING (ranks copy) → WHOLE (every rank has copied) → FILLING or FREE again."""

    FREE = auto()
    FILLING = auto()
    WHOLE = auto()


@dataclass
class Arena:
    """One buffer that holds one snapshot at a time.

    Attributes:
        files: name, offset and size in bytes of each file image.
        digests: by file name, once computed.
        digested: set when they are.
        num_tasks: digest and commit tasks that still read the buffer.
        commit_wanted: a commit was asked for, and has not failed.
        damaged: a reader found other bytes than were digested; must not be published.
    """

    number: int
    memory: SharedMemory
    state: ArenaState = ArenaState.FREE
    step: int = -1
    copied_by: set[int] = field(default_factory=set)
    info: SnapshotInfo | None = None
    files: list[tuple[str, int, int]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    digested: threading.Event = field(default_factory=threading.Event)
    num_tasks: int = 0
    commit_wanted: bool = False
    damaged: bool = False
    whole_since: float = 0.0

    def begin(self, step: int) -> None:
        """Forget the last snapshot and let the ranks copy this step."""
        self.state, self.step = ArenaState.FILLING, step
        self.copied_by.clear()
        self.digests = {}
        self.digested = threading.Event()
        self.commit_wanted = self.damaged = False

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.memory.buffer[offset : offset + nbytes]


@dataclass
class Fencing:
    """Shutting out the writers of older attempts, at one attempt's begin.

    Attributes:
        error: why it failed; to be read once `answered` is set.
    """

    attempt: int
    answered: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


@dataclass
class Client:
    """A connected process. `local_rank` is None for a monitor or before its hello."""

    sock: socket.socket
    is_monitor: bool = False
    local_rank: int | None = None
    local_world_size: int = 1
    attempt: int = -1
    sent_arenas: set[int] = field(default_factory=set)
    waits_for_arena: Message | None = None
    waits_for_step: int | None = None
    waits_for_offer: bool = False


class Agent:
    """The event loop. One thread owns all state; a second one digests whole snapshots, a third one commits them."""

    def __init__(
        self,
        listener: socket.socket,
        storage: Storage,
        run_id: str,
        commits: bool = True,
        memory_limit: int | None = None,
    ) -> None:
        self._listener = listener
        self._storage = storage
        self._run_id = run_id
        self._keep_last: int | None = None
        self._commits = commits
        self._memory_limit = memory_limit
        # What was last said about memory, so that it is said once.
        self._memory_told: int | None = None
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
        self._fencing = Fencing(-1)
        self._fencing.answered.set()
        # Attempts may follow each other faster than storage answers.
        self._fence_lock = threading.Lock()
        self._swept = False
        self._to_digest: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        # An arena to commit; "prune"; or None to end.
        self._to_commit: queue.SimpleQueue[Arena | Literal["prune"] | None] = queue.SimpleQueue()
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
        threads = [
            threading.Thread(target=self._digest_loop, name="checkpoint-digester", daemon=True),
            threading.Thread(target=self._commit_loop, name="checkpoint-writer", daemon=True),
        ]
        for thread in threads:
            thread.start()
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
                    self._commit_newest()
        self._to_digest.put(None)
        self._to_commit.put(None)
        for thread in threads:
            thread.join()

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
            case "offer":
                client.waits_for_offer = True
                self._answer_waiting()
            case "discard":
                self._discard(int(message["step"]), message["reason"])
            case "reserve":
                self._reserve(client, int(message["nbytes"]))
            case "abandon":
                self._abandon(client, message)
            case "prune":
                self._keep_last = message["keep_last"]
                self._to_commit.put("prune")
            case "announce":
                self._publish(message["event"])
            case "begin_attempt":
                self._begin_attempt(int(message["attempt"]))
                self._reply(client, {"event": "attempt_begun", "attempt": self._attempt})
            case "request_stop":
                self._control.stop_requested = True
            case "end_attempt":
                # Ranks that have died may have left messages unread; they come before the answer.
                self._read_pending()
                self._drop_unfinished()
                self._commit_newest()
                self._reply(client, {"event": "attempt_over"})
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
        self._reply(client, {"run_id": self._run_id}, (self._control.fd,))

    def _fence(self, attempt: int) -> None:
        """Shut out writers of older attempts, wherever they are; what we still hold of older attempts stays ours."""
        if not self._commits:
            return
        held = {(a.step, a.info.attempt) for a in self._arenas if a.state is ArenaState.WHOLE and a.info is not None}
        fencing = self._fencing = Fencing(attempt)

        def work() -> None:
            with self._fence_lock:
                try:
                    if fencing is self._fencing:
                        self._storage.begin_attempt(attempt, held)
                        if not self._swept:  # nothing of ours is being written yet
                            self._storage.sweep()
                            self._swept = True
                except Fenced as error:
                    fencing.error = str(error)
                    self._tell(None, {"event": "fenced", "reason": str(error)})
                except OSError as error:
                    fencing.error = error.strerror or str(error)
            fencing.answered.set()
            self._tell(None, {"event": "fence_answered"})

        threading.Thread(target=work, name="checkpoint-fence", daemon=True).start()

    def _begin_attempt(self, attempt: int) -> None:
        if attempt <= self._attempt:
            return
        self._drop_unfinished()
        self._attempt = attempt
        self._fence(attempt)
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
            arena = self._arena_for(int(message["nbytes"]))
            if arena is None and self._arenas and message["wait"]:
                client.waits_for_arena = message
                return
            self._decided = (step, arena)
            if arena is not None:
                arena.begin(step)
            elif self._arenas:
                self._publish({"event": "snapshot_skipped", "step": step, "reason": "all arenas are being written"})
        elif self._decided is None or self._decided[0] != step:
            client.waits_for_arena = message
            return
        arena = self._decided[1]
        if arena is None:
            self._reply(client, {"busy": True} if self._arenas else {"no_memory": True})
        else:
            fds = self._fds_of([arena], client)
            self._reply(client, {"arena": arena.number, "live": [other.number for other in self._arenas]}, fds)
        if client.local_rank == 0:
            self._answer_waiting()

    def _fds_of(self, arenas: Sequence[Arena], client: Client) -> tuple[int, ...]:
        """Descriptors of those arenas that the client does not have yet."""
        new = [arena for arena in arenas if arena.number not in client.sent_arenas]
        client.sent_arenas |= {arena.number for arena in new}
        return tuple(arena.memory.fd for arena in new)

    def _arena_for(self, nbytes: int) -> Arena | None:
        """An arena to fill; None where all are in use, or there is no memory for even one (`_arenas` is empty then)."""
        self._allocate(nbytes)
        usable = [arena for arena in self._arenas if arena.memory.nbytes >= nbytes and self._may_be_refilled(arena)]
        return min(usable, key=lambda arena: (arena.state is not ArenaState.FREE, arena.step), default=None)

    def _may_be_refilled(self, arena: Arena) -> bool:
        if arena.state is ArenaState.FREE:
            return True
        if arena.state is not ArenaState.WHOLE or arena.num_tasks > 0:
            return False
        return len(self._arenas) == 1 or any(
            other.state is ArenaState.WHOLE and not other.damaged for other in self._arenas if other is not arena
        )

    def _reserve(self, client: Client, nbytes: int) -> None:
        """Make arenas of this size ahead of the first snapshot, and hand them out."""
        self._allocate(nbytes)
        numbers = [arena.number for arena in self._arenas]
        new = [arena for arena in self._arenas if arena.number not in client.sent_arenas]
        self._reply(client, {"arenas": [arena.number for arena in new], "live": numbers}, self._fds_of(new, client))

    def _allocate(self, nbytes: int) -> None:
        """Have as many arenas of at least `nbytes` as the memory limit allows, up to `NUM_ARENAS`."""
        if sum(arena.memory.nbytes >= nbytes for arena in self._arenas) == NUM_ARENAS:
            return
        # The log history grows with every save; without some air, so would the arena, all of it anew each time.
        capacity = round_up(nbytes + max(nbytes // _GROWTH_SHARE, _GROWTH_BYTES))
        held = sum(arena.memory.nbytes for arena in self._arenas)
        limit = self._memory_limit
        if limit is None:
            limit = held + int(available_bytes() * DEFAULT_SHARE)
        for arena in list(self._arenas):
            if arena.memory.nbytes < nbytes and self._may_be_refilled(arena):
                self._arenas.remove(arena)
                arena.memory.close()
                held -= arena.memory.nbytes
        why = f"{limit / 1e6:.0f} MB may be used (checkpoint.memory_limit)"
        while len(self._arenas) < NUM_ARENAS and held + capacity <= limit:
            try:
                memory = SharedMemory.create("checkpoint-arena", capacity)
            except OSError as error:
                why = f"the system refused more ({error.strerror})"
                break
            held += memory.nbytes
            self._arenas.append(Arena(self._next_arena_number, memory))
            self._next_arena_number += 1
        if len(self._arenas) < NUM_ARENAS:
            self._tell_memory(len(self._arenas), capacity, why)

    def _tell_memory(self, num_arenas: int, capacity: int, limit: str) -> None:
        if self._memory_told == num_arenas:
            return
        self._memory_told = num_arenas
        effect = (
            "one snapshot at a time: one is skipped while the last is being written"
            if num_arenas
            else "no snapshot in memory: every save blocks training until it is written"
        )
        self._publish(
            {
                "event": "memory_short",
                "arenas": num_arenas,
                "reason": f"a snapshot takes {capacity / 1e6:.0f} MB, {NUM_ARENAS} are wanted, {limit}; {effect}",
            }
        )

    def _staged(self, client: Client, message: Message) -> None:
        arena = self._filling(client, message)
        if arena is None:
            return
        assert client.local_rank is not None
        arena.copied_by.add(client.local_rank)
        if client.local_rank == 0:
            arena.files = [(name, int(offset), int(nbytes)) for name, offset, nbytes in message["files"]]
            arena.commit_wanted = bool(message["commit"])
            self._keep_last = message["keep_last"]
            arena.info = SnapshotInfo(
                run_id=self._run_id,
                attempt=client.attempt,
                step=arena.step,
                world_size=int(message["world_size"]),
                samples_consumed=int(message["samples_consumed"]),
            )
        if len(arena.copied_by) == client.local_world_size:
            arena.state = ArenaState.WHOLE
            arena.whole_since = time.monotonic()
            arena.num_tasks += 1
            self._to_digest.put(arena)
            self._publish({"event": "snapshot", "step": arena.step, "to_be_committed": arena.commit_wanted})
            if arena.commit_wanted:
                self._commit_later(arena)

    def _filling(self, client: Client, message: Message) -> Arena | None:
        """The arena that a message speaks of, if it is still being filled for that step."""
        for arena in self._arenas:
            if arena.number == message["arena"] and arena.step == message["step"] and client.attempt == self._attempt:
                return arena if arena.state is ArenaState.FILLING else None
        return None

    def _abandon(self, client: Client, message: Message) -> None:
        """A rank found that what it copied is not the state of one step."""
        arena = self._filling(client, message)
        if arena is not None:
            arena.state = ArenaState.FREE
            self._publish({"event": "snapshot_dropped", "step": arena.step, "reason": message["reason"]})

    def _commit_later(self, arena: Arena) -> None:
        arena.commit_wanted = True
        if self._commits:
            arena.num_tasks += 1
            self._to_commit.put(arena)
        else:
            self._outcomes[arena.step] = {"committed": True}
            self._answer_waiting()

    def _commit_newest(self) -> None:
        """The trainer is gone: the newest state that it left is worth a checkpoint."""
        whole = [arena for arena in self._arenas if arena.state is ArenaState.WHOLE and not arena.damaged]
        newest = max(whole, key=lambda arena: arena.step, default=None)
        if newest is not None and not newest.commit_wanted:
            self._commit_later(newest)

    def _offer(self, client: Client) -> None:
        """Tell a rank which snapshots it could go on from."""
        whole = [a for a in self._arenas if a.state is ArenaState.WHOLE and a.info is not None and not a.damaged]
        snapshots = [
            {
                **asdict(arena.info),
                "arena": arena.number,
                "files": [(name, offset, size, arena.digests[name]) for name, offset, size in arena.files],
            }
            for arena in whole
            if arena.info is not None
        ]
        new = [arena for arena in whole if arena.number not in client.sent_arenas]
        reply = {"snapshots": snapshots, "arenas": [arena.number for arena in new]}
        self._reply(client, reply, self._fds_of(new, client))

    def _discard(self, step: int, reason: str) -> None:
        """A rank read other bytes than were digested: never offer or publish them."""
        for arena in self._arenas:
            if arena.state is ArenaState.WHOLE and arena.step == step and not arena.damaged:
                arena.damaged = True
                self._publish({"event": "snapshot_damaged", "step": step, "reason": reason})
                if arena.num_tasks == 0:
                    arena.state = ArenaState.FREE

    # -- progress ------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return any(arena.num_tasks > 0 for arena in self._arenas)

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
                self._publish({"event": "snapshot_dropped", "step": arena.step, "reason": "a rank ended in mid-copy"})
                arena.state = ArenaState.FREE

    def _answer_waiting(self) -> None:
        for client in list(self._clients.values()):
            if client.waits_for_arena is not None:
                message, client.waits_for_arena = client.waits_for_arena, None
                self._acquire(client, message)
            if client.waits_for_step is not None and client.waits_for_step in self._outcomes:
                step, client.waits_for_step = client.waits_for_step, None
                self._reply(client, self._outcomes[step])
            digested = all(arena.digested.is_set() for arena in self._arenas if arena.state is ArenaState.WHOLE)
            if client.waits_for_offer and digested and self._fencing.answered.is_set():
                client.waits_for_offer = False
                if self._fencing.error is None:
                    self._offer(client)
                else:
                    self._reply(client, {"error": self._fencing.error})

    def _handle_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        while self._results:
            arena, event = self._results.popleft()
            if arena is not None:
                arena.num_tasks -= 1
                if event["event"] != "digested":
                    self._outcomes[arena.step] = {
                        "committed": event["event"] == "committed",
                        "error": event.get("error"),
                    }
                if event["event"] == "committed":
                    self._control.last_commit = CommitReport(arena.step, event["duration_s"], event["cpu_s"])
                if arena.damaged and arena.num_tasks == 0:
                    arena.state = ArenaState.FREE
            if event["event"] not in ("digested", "fence_answered"):
                self._publish(event)
        self._answer_waiting()

    # -- the other threads ---------------------------------------------------------------------------------------

    def _digest_loop(self) -> None:
        while (arena := self._to_digest.get()) is not None:
            arena.digests = {name: digest_buffer(arena.view(offset, size)) for name, offset, size in arena.files}
            arena.digested.set()
            self._tell(arena, {"event": "digested"})

    def _commit_loop(self) -> None:
        while (task := self._to_commit.get()) is not None:
            if task != "prune":
                try:
                    event = self._commit(task)
                except Exception as error:
                    # Whatever it was, the run must learn of it and the arena must become free again.
                    event = {"event": "commit_failed", "step": task.step, "error": f"{type(error).__name__}: {error}"}
                self._tell(task, event)
                if event["event"] != "committed":
                    continue
            self._prune()

    def _commit(self, arena: Arena) -> Message:
        assert arena.info is not None
        # The sweep must not meet our own temporary data.
        while not self._fencing.answered.is_set():
            self._fencing.answered.wait()
        began = time.process_time()

        def digest_of(name: str) -> str:
            arena.digested.wait()
            return arena.digests[name]

        files = [
            StagedFile(name, [arena.view(offset, size)], functools.partial(digest_of, name))
            for name, offset, size in arena.files
        ]
        try:
            manifest = commit_snapshot(self._storage, arena.info, files, may_publish=lambda: not arena.damaged)
        except CheckpointError as error:
            if isinstance(error, Fenced):
                self._tell(None, {"event": "fenced", "reason": str(error)})
            return {"event": "commit_failed", "step": arena.step, "error": str(error)}
        return {
            "event": "committed",
            "step": arena.step,
            "attempt": arena.info.attempt,
            "nbytes": manifest.total_bytes,
            "duration_s": round(time.monotonic() - arena.whole_since, 4),
            "cpu_s": round(time.process_time() - began, 4),
        }

    def _prune(self) -> None:
        if self._keep_last is None:
            return
        try:
            for step in steps_to_remove(Catalog(self._storage).committed_steps(), self._keep_last):
                self._storage.remove(step)
                self._tell(None, {"event": "pruned", "step": step})
        except OSError as error:
            self._tell(None, {"event": "prune_failed", "error": str(error)})

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
    parser.add_argument("--memory-limit", type=int, help="bytes that snapshots may take; default: half of what is free")
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args(argv)

    # A parent that dies without a word must not take uncommitted snapshots with it: drain, then end.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _IO_PRIORITY)

    def report(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(arguments.ready_fd, text.encode())
        os.close(arguments.ready_fd)

    try:
        storage = open_storage(arguments.location)
        if isinstance(storage, LocalStorage) and not arguments.no_commit:
            acquire_lock(storage.root, LOCK_TIMEOUT_S)
        listener = protocol.listen(arguments.socket)
    except (OSError, ValueError) as error:
        report(f"error {error}")
        return 1
    agent = Agent(
        listener, storage, arguments.run_id, commits=not arguments.no_commit, memory_limit=arguments.memory_limit
    )
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    report("ready")
    agent.run()
    with contextlib.suppress(OSError):
        Path(arguments.socket).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
