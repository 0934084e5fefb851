"""The checkpoint agent: one process per node that owns the snapshot arenas, and has them written to storage.

It outlives the ranks: a snapshot that was whole when its trainer died is committed all the same. No torch here. This is
the conversation with ranks and monitors; what touches storage is in `checkpointing.agent.storage_worker`.

    python -m checkpointing.agent --options JSON --socket PATH --ready-fd FD --parent-pid PID

Clients speak `checkpointing.agent.protocol` over the socket. A rank says `hello`, asks for an `offer` of snapshots to
resume from, then for each snapshot says `acquire`, `staged` (or `abandon`), and where it must know the outcome `wait`.
A monitor (the supervisor) says `hello`, `begin_attempt`, `request_stop`, `end_attempt`, `note`, `ping`, `shutdown`, and
receives every event. When the last monitor goes, or on SIGTERM where there is none, the agent commits the newest whole
snapshot and ends.

A snapshot stays in its arena after it was committed, until the room is needed: an attempt that dies goes on from it
without reading storage. One whole snapshot is always kept while the next one is being made, wherever there is memory
for two.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from checkpointing.agent import protocol
from checkpointing.agent.arenas import Arena, ArenaPool, ArenaState
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Message
from checkpointing.agent.results import (
    Digested,
    FenceAnswered,
    Result,
    UploadEnded,
    stamped,
    stamped_announcement,
)
from checkpointing.agent.storage_worker import Fencing, Writer
from checkpointing.events import (
    CommitFailed,
    Committed,
    Event,
    Fetched,
    FetchFailed,
    MemoryShort,
    SnapshotDamaged,
    SnapshotDropped,
    SnapshotSkipped,
    SnapshotTaken,
    StageEntered,
)
from checkpointing.heartbeat import CommitReport, ControlPage
from checkpointing.manifest import SnapshotInfo
from checkpointing.retention import Retention
from checkpointing.shared_memory import round_up
from checkpointing.stages import FIRST_STAGE, STAGE_NAME, Stage
from checkpointing.tiers import Tiers


@dataclass
class Client:
    """A connected process. `local_rank` is None for a monitor or before its hello."""

    sock: socket.socket
    is_monitor: bool = False
    local_rank: int | None = None
    local_world_size: int = 1
    attempt: int = -1
    stage: str = ""
    sent_arenas: set[int] = field(default_factory=set)
    waits_for_arena: Message | None = None
    waits_for_step: int | None = None
    waits_for_offer: bool = False


class Agent:
    """The event loop. One thread owns all state; the writer's threads read whole arenas and report."""

    def __init__(
        self,
        listener: socket.socket,
        tiers: Tiers,
        options: AgentOptions,
    ) -> None:
        self._listener = listener
        self._run_id = options.run_id
        self._commits = options.commits
        self._control = ControlPage.create()
        self._attempt = -1
        self._pool = ArenaPool(options.memory_limit, self._memory_short)
        # One for each stage of the run, by name; and that of the stage which trains now.
        self._stage = FIRST_STAGE
        self._make_writer = functools.partial(Writer, commits=options.commits, local_retention=options.local_retention)
        self._tiers, self._writers = tiers, {FIRST_STAGE.name: self._make_writer(tiers, self._tell)}
        # Of the attempt, in the stage that trains now.
        self._fencing: Fencing | None = None
        # The newest checkpoint is to be read into memory before the ranks ask.
        self._fetch_wanted = False
        # The leader's latest decision: which request it answers (a step may be asked for again), and the arena, or None
        # where the step is skipped.
        self._decided: tuple[tuple[int, int], Arena | None] | None = None
        self._outcomes: dict[int, Message] = {}
        self._clients: dict[socket.socket, Client] = {}
        self._had_monitor = False
        self._stopping = False
        self._drained = False
        # The newest snapshot could not be committed.
        self._gave_up = False
        self._results: deque[tuple[Result, Arena | None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    def stop(self) -> None:
        """Finish the snapshots that are whole, then return from `run`. Safe in a signal handler.

        A monitor that lives says itself when it is time: some clusters tell every process of a job to stop (Slurm
        signals all that a step has started), and the snapshot that the ranks then make must find the agent there.
        """
        if any(client.is_monitor for client in self._clients.values()):
            return
        self._stopping = True
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"x")

    def run(self) -> bool:
        """Serve until told to stop; returns whether the newest snapshot is committed then."""
        self._run_writer.start()
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not (self._drained and not self._busy()):
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
                    if not self._drained and not self._busy():
                        # What failed to reach the durable tier before is tried a last time.
                        self._drained = True
                        for writer in self._writers.values():
                            writer.upload()
        for writer in self._writers.values():
            writer.close()
        # Their last words.
        self._take_results()
        return not self._gave_up

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

    def _publish(self, event: Event) -> None:
        self._send_to_monitors(event.to_dict())

    def _send_to_monitors(self, message: Message) -> None:
        for client in [client for client in self._clients.values() if client.is_monitor]:
            self._reply(client, message)

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
                self._writer.retention = Retention(**message["retention"])
                self._writer.prune()
            case "announce":
                self._send_to_monitors(stamped_announcement(message["event"], self._stage))
            case "begin_attempt":
                self._begin_attempt(int(message["attempt"]), fetch=bool(message["fetch"]))
                self._reply(client, {"event": protocol.ATTEMPT_BEGUN, "attempt": self._attempt})
            case "request_stop":
                self._control.stop_requested = True
            case "end_attempt":
                # Ranks that have died may have left messages unread; they come before the answer.
                self._read_pending()
                self._drop_unfinished()
                self._commit_newest()
                self._reply(client, {"event": protocol.ATTEMPT_OVER})
            case "note":
                self._run_writer.note(message["text"])
            case "record":
                self._run_writer.record(message["name"], message["path"], int(message["start"]), int(message["end"]))
            case "ping":
                self._reply(client, {"event": protocol.PONG})
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
                self._begin_attempt(message["attempt"], fetch=bool(message["fetch"]))
            self._enter(Stage(**message["stage"]), fetch=bool(message["fetch"]))
            client.attempt = message["attempt"]
            client.local_rank = message["local_rank"]
            client.stage = self._stage.name
            client.local_world_size = message["local_world_size"]
        self._reply(client, {"run_id": self._run_id}, (self._control.fd,))

    def _begin_attempt(self, attempt: int, *, fetch: bool) -> None:
        if attempt <= self._attempt:
            return
        self._drop_unfinished()
        self._attempt = attempt
        self._stage = FIRST_STAGE
        self._begin_stage(fetch=fetch)
        self._control.stop_requested = False
        self._control.clear()

    def _enter(self, stage: Stage, *, fetch: bool) -> None:
        """The ranks begin another training of this run: its checkpoints are kept apart from those before it.

        Nothing of the stage before is unfinished: its ranks have waited for their last commit.
        """
        if stage.name == self._stage.name:
            return
        if not STAGE_NAME.fullmatch(stage.name):
            raise ValueError(f"{stage.name!r} is no name of a stage")
        self._drop_unfinished()
        self._stage = stage
        if stage.name not in self._writers:
            tell = functools.partial(self._tell_of, stage)
            self._writers[stage.name] = self._make_writer(self._tiers.inside(stage), tell)
            self._writers[stage.name].start()
        self._control.last_commit = CommitReport()
        self._begin_stage(fetch=fetch)
        self._publish(StageEntered(stage=stage.name, number=stage.number, steps_before=stage.steps_before))
        self._run_writer.keep(f"{stage.name}.json", stage.to_json())

    def _begin_stage(self, *, fetch: bool) -> None:
        self._fetch_wanted = fetch
        self._decided = None
        self._outcomes.clear()
        # What is still held of older attempts stays ours to commit.
        whole = [arena for arena in self._of_stage() if arena.state is ArenaState.WHOLE]
        held = [(arena.step, arena.info.attempt) for arena in whole if arena.info]
        self._fencing = self._writer.begin_attempt(self._attempt, held)

    @property
    def _writer(self) -> Writer:
        """Of the stage that trains now."""
        return self._writers[self._stage.name]

    @property
    def _run_writer(self) -> Writer:
        """Of the run's own location, where other machines look for what is kept of the run as a whole."""
        return self._writers[FIRST_STAGE.name]

    def _of_stage(self) -> list[Arena]:
        """Arenas whose snapshot is of the stage that trains now."""
        return [arena for arena in self._pool.arenas if arena.stage == self._stage.name]

    def _acquire(self, client: Client, message: Message) -> None:
        """Give the arena of a step. The node's leader knows the size and so decides; its peers follow."""
        if client.local_rank is None or client.attempt != self._attempt:
            self._reply(client, {"error": "this attempt is over"})
            return
        if client.stage != self._stage.name:
            reason = "another CheckpointManager of this script trains now; let one end before the next begins"
            self._reply(client, {"error": reason})
            return
        step = int(message["step"])
        request = (step, int(message["number"]))
        if client.local_rank == 0:
            arena = self._pool.take(int(message["nbytes"]))
            if arena is None and self._pool.arenas and message["wait"]:
                client.waits_for_arena = message
                return
            self._decided = (request, arena)
            if arena is not None:
                arena.begin(step, self._stage.name)
            elif self._pool.arenas:
                self._publish_step(SnapshotSkipped(step=step, reason="all arenas are being written"))
        elif self._decided is None or self._decided[0] != request:
            client.waits_for_arena = message
            return
        arena = self._decided[1]
        if arena is None:
            self._reply(client, {"busy": True} if self._pool.arenas else {"no_memory": True})
        else:
            fds = self._fds_of([arena], client)
            self._reply(client, {"arena": arena.number, "live": [other.number for other in self._pool.arenas]}, fds)
        if client.local_rank == 0:
            self._answer_waiting()

    def _fds_of(self, arenas: Sequence[Arena], client: Client) -> tuple[int, ...]:
        """Descriptors of those arenas that the client does not have yet."""
        new = [arena for arena in arenas if arena.number not in client.sent_arenas]
        client.sent_arenas |= {arena.number for arena in new}
        return tuple(arena.memory.fd for arena in new)

    def _reserve(self, client: Client, nbytes: int) -> None:
        """Make arenas of this size ahead of the first snapshot, and hand them out."""
        self._pool.allocate(nbytes)
        numbers = [arena.number for arena in self._pool.arenas]
        new = [arena for arena in self._pool.arenas if arena.number not in client.sent_arenas]
        self._reply(client, {"arenas": [arena.number for arena in new], "live": numbers}, self._fds_of(new, client))

    def _staged(self, client: Client, message: Message) -> None:
        arena = self._filling(client, message)
        if arena is None:
            return
        assert client.local_rank is not None
        arena.copied_by.add(client.local_rank)
        if client.local_rank == 0:
            arena.files = [(name, int(offset), int(nbytes)) for name, offset, nbytes in message["files"]]
            arena.commit_wanted = bool(message["commit"])
            self._writer.retention = Retention(**message["retention"])
            arena.info = SnapshotInfo(
                run_id=self._run_id,
                attempt=client.attempt,
                step=arena.step,
                world_size=int(message["world_size"]),
                samples_consumed=int(message["samples_consumed"]),
                metrics=message["metrics"],
            )
        if len(arena.copied_by) == client.local_world_size:
            arena.state = ArenaState.WHOLE
            arena.whole_since = time.monotonic()
            arena.num_tasks += 1
            self._writer.digest(arena)
            self._publish_step(SnapshotTaken(step=arena.step, to_be_committed=arena.commit_wanted))
            if arena.commit_wanted:
                self._commit_later(arena)

    def _filling(self, client: Client, message: Message) -> Arena | None:
        """The arena that a message speaks of, if it is still being filled for that step."""
        for arena in self._pool.arenas:
            if arena.number == message["arena"] and arena.step == message["step"] and client.attempt == self._attempt:
                return arena if arena.state is ArenaState.FILLING else None
        return None

    def _abandon(self, client: Client, message: Message) -> None:
        """A rank found that what it copied is not the state of one step."""
        arena = self._filling(client, message)
        if arena is not None:
            arena.state = ArenaState.FREE
            self._publish_step(SnapshotDropped(step=arena.step, reason=message["reason"]))

    def _commit_later(self, arena: Arena) -> None:
        arena.commit_wanted = True
        if self._commits:
            arena.num_tasks += 1
            self._writers[arena.stage].commit(arena)
        else:
            self._outcomes[arena.step] = {"committed": True}
            self._answer_waiting()

    def _commit_newest(self) -> None:
        """The trainer is gone: the newest state that it left is worth a checkpoint."""
        # Those of a stage that is over were committed before it ended.
        newest = self._pool.newest(self._stage.name)
        if newest is not None and not newest.commit_wanted:
            self._commit_later(newest)

    def _offer(self, client: Client) -> None:
        """Tell a rank which snapshots it could go on from."""
        whole = [arena for arena in self._of_stage() if arena.is_usable]
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
        assert self._fencing is not None
        reply = {
            "snapshots": snapshots,
            "arenas": [arena.number for arena in new],
            "unreachable": self._fencing.unreachable,
        }
        self._reply(client, reply, self._fds_of(new, client))

    def _discard(self, step: int, reason: str) -> None:
        """A rank read other bytes than were digested: never offer or publish them."""
        for arena in self._of_stage():
            if arena.state is ArenaState.WHOLE and arena.step == step and not arena.damaged:
                arena.damaged = True
                self._publish_step(SnapshotDamaged(step=step, reason=reason))
                if arena.num_tasks == 0:
                    arena.state = ArenaState.FREE

    # -- progress ------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        uploading = any(writer.uploading for writer in self._writers.values())
        return uploading or any(arena.num_tasks > 0 for arena in self._pool.arenas)

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
        for arena in self._pool.arenas:
            if arena.state is ArenaState.FILLING:
                self._publish_step(SnapshotDropped(step=arena.step, reason="a rank ended in mid-copy"))
                arena.state = ArenaState.FREE

    def _answer_waiting(self) -> None:
        for client in list(self._clients.values()):
            if client.waits_for_arena is not None:
                message, client.waits_for_arena = client.waits_for_arena, None
                self._acquire(client, message)
            if client.waits_for_step is not None and client.waits_for_step in self._outcomes:
                step, client.waits_for_step = client.waits_for_step, None
                self._reply(client, self._outcomes[step])
            digested = all(arena.digested.is_set() for arena in self._pool.arenas if arena.state is ArenaState.WHOLE)
            fetching = next((arena for arena in self._of_stage() if arena.state is ArenaState.FETCHING), None)
            if client.waits_for_offer and fetching is not None and fetching.number not in client.sent_arenas:
                # Time enough to map it, and to make room for a copy.
                fds = self._fds_of([fetching], client)
                self._reply(client, {"fetching": fetching.files, "arenas": [fetching.number]}, fds)
            if client.waits_for_offer and digested and self._fencing is not None and self._may_offer():
                client.waits_for_offer = False
                if self._fencing.error is None:
                    self._offer(client)
                else:
                    kind = "error" if self._fencing.fenced else "storage_error"
                    self._reply(client, {kind: self._fencing.error})

    def _handle_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        self._take_results()
        self._answer_waiting()

    def _take_results(self) -> None:
        while self._results:
            self._take_result(*self._results.popleft())

    def _take_result(self, result: Result, arena: Arena | None) -> None:
        """What a thread of the writer reports; it has finished with `arena`."""
        if arena is not None:
            arena.num_tasks -= 1
            self._take_outcome(result, arena)
            if arena.damaged and arena.num_tasks == 0:
                arena.state = ArenaState.FREE
        match result:
            case FenceAnswered():
                self._begin_fetch()
            case Event():
                self._publish(result)
            case Digested() | UploadEnded():
                pass

    def _take_outcome(self, result: Result, arena: Arena) -> None:
        """Note what has become of a snapshot, or of what was to be read into an arena."""
        is_current = arena.stage == self._stage.name
        match result:
            case Committed(duration_s=duration_s, cpu_s=cpu_s) if is_current:
                self._outcomes[arena.step] = {"committed": True, "error": None}
                self._control.last_commit = CommitReport(arena.step, duration_s or 0.0, cpu_s or 0.0)
            case CommitFailed(error=error):
                if is_current:
                    self._outcomes[arena.step] = {"committed": False, "error": error}
                # Tried again when its ranks are gone, and, if it is still the newest, a last time at the end.
                arena.commit_wanted = self._stopping
                self._gave_up = self._stopping
            case Fetched():
                arena.state, arena.whole_since = ArenaState.WHOLE, time.monotonic()
            case FetchFailed():
                arena.state = ArenaState.FREE

    def _begin_fetch(self) -> None:
        """Read the newest checkpoint while the ranks are still starting, if it is not on this machine."""
        assert self._fencing is not None
        entry = self._fencing.newest if self._fencing.answered.is_set() else None
        if not self._fetch_wanted or entry is None or entry.storage.directory(entry.step) is not None:
            return
        self._fetch_wanted = False
        manifest, held = entry.manifest, self._pool.newest(self._stage.name)
        assert manifest is not None
        on_its_way = any(a.state is ArenaState.FETCHING and a.step == entry.step for a in self._of_stage())
        if on_its_way or (held is not None and held.step >= entry.step):
            return
        files, end = [], 0
        for file in manifest.files:
            files.append((file.name, end, file.size))
            end += round_up(max(file.size, 1))
        # The other one is made beside the first step.
        arena = self._pool.take(end, num_wanted=1)
        if arena is None:
            return
        arena.begin(entry.step, self._stage.name, ArenaState.FETCHING)
        arena.files = files
        arena.info = manifest.info
        arena.commit_wanted = True  # it is committed
        arena.num_tasks += 1
        self._writer.fetch(entry, arena)
        self._answer_waiting()

    def _may_offer(self) -> bool:
        assert self._fencing is not None
        fetching = any(arena.state is ArenaState.FETCHING for arena in self._of_stage())
        return self._fencing.answered.is_set() and not fetching

    def _memory_short(self, num_arenas: int, reason: str) -> None:
        self._publish(MemoryShort(arenas=num_arenas, reason=reason))

    def _publish_step(self, event: Event) -> None:
        """Publish an event of the stage that trains now."""
        self._publish(stamped(event, self._stage))

    def _tell_of(self, stage: Stage, result: Result, arena: Arena | None) -> None:
        self._tell(stamped(result, stage), arena)

    def _tell(self, result: Result, arena: Arena | None) -> None:
        self._results.append((result, arena))
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"x")
