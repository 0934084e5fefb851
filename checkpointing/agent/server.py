"""The checkpoint agent: one process per node that owns the snapshot arenas, and has them written to storage.

It outlives the ranks: a snapshot that was whole when its trainer died is committed all the same. No torch here. This is
the conversation with ranks and monitors; `scheduler` and `resumption` decide, `storage_worker` touches storage.

    python -m checkpointing.agent --options JSON --socket PATH --ready-fd FD --parent-pid PID

Clients speak `checkpointing.agent.protocol` over the socket. A rank says `hello`, asks for an `offer` of snapshots to
resume from, then for each snapshot says `acquire`, `staged` (or `abandon`), and where it must know the outcome `wait`.
A monitor (the supervisor) says `hello`, `begin_attempt`, `request_stop`, `request_save`, `commit_newest`,
`end_attempt`, `restart_state`, `sidecar`, `ping`, `shutdown`, and receives every event. When the last monitor
disconnects, or on SIGTERM where there is none, the agent commits the newest whole snapshot and ends.

A snapshot stays in its arena after it was committed, until the memory is needed: after a crash the next attempt resumes
from it without reading storage. One whole snapshot is always kept while the next one is being made, wherever there is
memory for two.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from checkpointing.agent import protocol
from checkpointing.agent.arenas import Arena, ArenaPool
from checkpointing.agent.connections import Client, Connections
from checkpointing.agent.current_attempt import CurrentAttempt
from checkpointing.agent.events import Committed, Event, MemoryShort
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Guest, Message, Refusal
from checkpointing.agent.reporting import FenceAnswered, Report, Result, stamped_announcement
from checkpointing.agent.resumption import Resumption, described
from checkpointing.agent.scheduler import ArenaRequest, Scheduler, SnapshotContent
from checkpointing.agent.step_records import StepRecords
from checkpointing.agent.writer import Writer
from checkpointing.agent.writers import MakeWorker, Writers
from checkpointing.commit.replicated_save import ReplicatedSave
from checkpointing.commit.retention import Retention
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.commit.tiers import Tiers, TrainingStage
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.host.heartbeat import CommitReport, ControlPage


class Agent:
    """The event loop. One thread owns all state; the threads of storage workers read whole arenas and report."""

    def __init__(
        self, listener: socket.socket, tiers: Tiers, options: AgentOptions, make_worker: MakeWorker | None = None
    ) -> None:
        """Create an agent; it does not serve yet.

        Args:
            listener: Listening socket.
            tiers: Where the run keeps its checkpoints.
            options: The agent's options.
            make_worker: Creates the storage worker of a stage.
        """
        self._run_id = options.run_id
        self._drained = False
        self._results: Mailbox[tuple[Result, Arena | None]] = Mailbox()
        self.wakeup_fd = self._results.wakeup_fd
        self._connections = Connections(listener, self._results, on_abandoned=self._end)
        if make_worker is None:

            def make_worker(tiers: Tiers, report: Report, commits: bool) -> Writer:
                return Writer(tiers, report, commits=commits, local_retention=options.local_retention)

        self._workers = Writers(
            tiers,
            lambda result, arena: self._results.post((result, arena)),
            make_worker,
            commits=options.commits,
        )
        self._pool = ArenaPool(
            options.memory_limit, lambda number, reason: self._publish(MemoryShort(arenas=number, reason=reason))
        )
        self._scheduler = Scheduler(self._pool, self._workers, self._publish)
        self._resumption = Resumption(self._pool, self._scheduler, self._workers, self._publish)
        self._records = StepRecords()
        self._attempt = CurrentAttempt(
            self._workers, self._scheduler, self._resumption, ControlPage.create(), self._publish
        )

    def stop(self) -> None:
        """Finish the snapshots that are whole, then return from `run`. Safe in a signal handler.

        With a monitor connected this does nothing: the monitor says when it is time. Some clusters signal every process
        of a job (Slurm signals all that a step has started), and the snapshot that the ranks then make needs the agent.
        """
        if not self._connections.has_monitor:
            self._end()
            self._results.wake()

    def run(self) -> bool:
        """Serve until stopped.

        Returns:
            Whether the newest snapshot is committed, and is in the durable tier where this node writes.
        """
        self._workers.start()
        while not (self._drained and not self._scheduler.is_busy):
            self.serve_once()
        self._workers.close()
        # What the threads reported last.
        self._take_results()
        self._connections.close()
        return not self._scheduler.gave_up

    def serve_once(self, timeout_s: float | None = None) -> None:
        """Wait until something happens, and answer it."""
        for client, message in self._connections.poll(timeout_s):
            self._handle(client, message)
        if self._take_results():
            self._answer_waiting()
        if self._scheduler.is_ending:
            self._end_attempt()
            if not self._drained and not self._scheduler.is_busy:
                # What failed to reach the durable tier before is tried a last time.
                self._drained = True
                for name, data in self._records.files_after(self._attempt.control.last_commit.step):
                    self._workers.of_run.keep(name, data)
                self._workers.upload_due()

    # -- requests ------------------------------------------------------------------------------------------------

    def _handle(self, client: Client, message: Message) -> None:  # noqa: C901 - A table of requests.
        match message.get("do"):
            case "hello":
                self._hello(client, message)
            case "acquire":
                self._acquire(client, message)
            case "staged" | "received" | "abandon" if client.attempt != self._attempt.number:
                pass
            case "staged":
                self._staged(client, message)
            case "received":
                guest = Guest(**message["guest"]) if message["guest"] is not None else None
                self._scheduler.received(int(message["arena"]), int(message["step"]), client.local_rank, guest)
                self._answer_waiting()
            case "wait":
                client.waits_for_step = int(message["step"])
                self._answer_waiting()
            case "offer":
                client.waits_for_offer, client.waits_until_settled = True, bool(message["settled"])
                self._answer_waiting()
            case "discard":
                self._resumption.discard(int(message["step"]), message["reason"], damaged=bool(message["damaged"]))
            case "reserve":
                self._reserve(client, int(message["nbytes"]), int(message["guests"]))
            case "abandon":
                self._scheduler.abandon(message["arena"], message["step"], message["reason"])
            case "prune":
                self._workers.current.set_retention(Retention(**message["retention"]))
                self._workers.current.prune()
            case "announce":
                self._connections.send_to_monitors(stamped_announcement(message["event"], self._workers.stage))
            case _:
                self._handle_monitor(client, message)

    def _handle_monitor(self, client: Client, message: Message) -> None:
        match message.get("do"):
            case "begin_attempt":
                self._workers.commits = bool(message.get("commits", self._workers.commits))
                self._workers.hurry(False)
                self._attempt.begin(int(message["attempt"]), fetch=bool(message["fetch"]))
                self._connections.send(client, {"event": protocol.ATTEMPT_BEGUN, "attempt": self._attempt.number})
            case "request_stop":
                self._attempt.control.stop_requested = True
                self._workers.hurry(True)
            case "request_save":
                self._attempt.control.saves_requested += 1
            case "commit_newest":
                self._scheduler.commit_newest(ranks_go_on=True)
            case "end_attempt":
                self._end_attempt()
                self._connections.send(client, {"event": protocol.ATTEMPT_OVER})
            case "restart_state":
                self._workers.of_run.sidecars.replace_restart_state(message["text"])
            case "sidecar":
                path, start, end = Path(message["path"]), int(message["start"]), int(message["end"])
                self._workers.of_run.sidecars.write_part(message["name"], path, start, end)
            case "ping":
                self._connections.send(client, {"event": protocol.PONG})
            case "shutdown":
                self._end()
            case unknown:
                self._connections.send(client, {"error": f"unknown request {unknown!r}"})

    def _hello(self, client: Client, message: Message) -> None:
        if message["role"] == "monitor":
            self._connections.add_monitor(client)
        else:
            attempt, fetch = message["attempt"], bool(message["fetch"])
            if attempt < self._attempt.number:
                error = f"attempt {attempt} is over; {self._attempt.number} runs now"
                self._connections.send(client, {"error": error})
                return
            self._attempt.begin(attempt, fetch=fetch)
            self._attempt.enter(TrainingStage(**message["stage"]), fetch=fetch)
            client.attempt = attempt
            client.local_rank = message["local_rank"]
            client.stage = self._workers.stage.name
            client.local_world_size = message["local_world_size"]
        fds: tuple[int, ...] = (self._attempt.control.fd,)
        if client.local_rank is not None:
            fds += (self._records.of_rank(client.local_rank, int(message["rank"])).fd,)
        self._connections.send(client, {"run_id": self._run_id}, fds)

    def _end(self) -> None:
        self._scheduler.is_ending = True

    def _end_attempt(self) -> None:
        # Ranks that have died may have left messages unread, also where a signal has said so first.
        for rank, unread in self._connections.unread_of_ranks():
            self._handle(rank, unread)
        self._attempt.end()
        self._answer_waiting()

    def _acquire(self, client: Client, message: Message) -> None:
        """Answer a request for an arena, or keep it until it can be answered."""
        if client.local_rank is None or client.attempt != self._attempt.number:
            self._connections.send(client, {"error": "this attempt is over"})
            return
        if client.stage != self._workers.stage.name:
            reason = "another CheckpointManager of this script trains now; let one end before the next begins"
            self._connections.send(client, {"error": reason})
            return
        step, number, nbytes = int(message["step"]), int(message["number"]), int(message["nbytes"])
        request = ArenaRequest(step, number, nbytes, bool(message["wait"]), bool(message["urgent"]))
        answer = self._scheduler.acquire(request, is_leader=client.local_rank == 0)
        match answer:
            case None:
                client.waits_for_arena = message
                return
            case Arena():
                live = [other.number for other in self._pool.arenas]
                self._connections.send(client, {"arena": answer.number, "live": live}, _new_fds([answer], client))
            case Refusal.BUSY:
                self._connections.send(client, {"busy": True})
            case Refusal.NO_MEMORY:
                self._connections.send(client, {"no_memory": True})
        if client.local_rank == 0:
            self._answer_waiting()

    def _reserve(self, client: Client, nbytes: int, guests: int) -> None:
        """Make arenas of this size ahead of the first snapshot, and hand them out; with room for guests if there is."""
        has_room, arenas = self._pool.reserve(nbytes, guests), self._pool.arenas
        reply = {"arenas": _unsent(arenas, client), "live": [arena.number for arena in arenas], "has_room": has_room}
        self._connections.send(client, reply, _new_fds(arenas, client))

    def _staged(self, client: Client, message: Message) -> None:
        assert client.local_rank is not None
        content = None
        if client.local_rank == 0:
            self._workers.current.set_retention(Retention(**message["retention"]))
            content = _content(message, self._run_id, client.attempt)
        number, step = int(message["arena"]), int(message["step"])
        receives = bool(message["receives"])
        local_rank, local_world_size = client.local_rank, client.local_world_size
        said = message.get("words")
        words = (int(said[0]), int(said[1])) if said is not None else None
        self._scheduler.copied(
            number,
            step,
            local_rank,
            local_world_size,
            content,
            receives=receives,
            words=words,
            not_finite=tuple(map(str, message.get("not_finite", ()))),
        )
        self._answer_waiting()

    # -- answers that had to wait --------------------------------------------------------------------------------

    def _answer_waiting(self) -> None:
        for client in self._connections:
            if client.waits_for_arena is not None:
                message, client.waits_for_arena = client.waits_for_arena, None
                self._acquire(client, message)
            if client.waits_for_step is not None and client.waits_for_step in self._scheduler.outcomes:
                error, client.waits_for_step = self._scheduler.outcomes[client.waits_for_step], None
                self._connections.send(client, {"committed": error is None, "error": error})
            if client.waits_for_offer:
                self._offer(client)

    def _offer(self, client: Client) -> None:
        """Send a rank what it may resume from, once that is known; meanwhile what is being read, to be mapped."""
        fetching = self._resumption.fetching
        if fetching is not None and fetching.number not in client.sent_arenas:
            fds = _new_fds([fetching], client)
            self._connections.send(client, {"fetching": fetching.files, "arenas": [fetching.number]}, fds)
        if not self._resumption.is_known(settled=client.waits_until_settled):
            return
        client.waits_for_offer = False
        refusal = self._resumption.refusal()
        if refusal is not None:
            self._connections.send(client, refusal)
            return
        offered = self._resumption.offered()
        reply: Message = {"snapshots": [described(arena) for arena in offered], "arenas": _unsent(offered, client)}
        reply |= {"unreachable": self._resumption.unreachable, "saving": self._resumption.saving}
        self._connections.send(client, reply, _new_fds(offered, client))

    # -- results -------------------------------------------------------------------------------------------------

    def _take_results(self) -> bool:
        taken = False
        for result, arena in self._results.take():
            taken = True
            self._scheduler.take_result(result, arena, is_last=self._drained)
            if isinstance(result, Committed) and arena is not None and arena.stage == self._workers.stage.name:
                report = CommitReport(arena.step, result.duration_s or 0.0, result.cpu_s or 0.0)
                self._attempt.control.last_commit = report
            if isinstance(result, FenceAnswered):
                self._resumption.fetch_newest()
            elif isinstance(result, Event):
                self._publish(result)
        return taken

    def _publish(self, event: Event) -> None:
        self._connections.send_to_monitors(event.to_dict())


def _content(message: Message, run_id: str, attempt: int) -> SnapshotContent:
    """Return what the node's leader says of a snapshot."""
    info = SnapshotInfo(
        run_id=run_id,
        attempt=attempt,
        step=int(message["step"]),
        world_size=int(message["world_size"]),
        samples_consumed=int(message["samples_consumed"]),
        metrics=message["metrics"],
    )
    files = [(name, int(offset), int(nbytes)) for name, offset, nbytes in message["files"]]
    save = message.get("save")
    return SnapshotContent(info, files, bool(message["commit"]), _save(save) if save is not None else None)


def _save(message: Message) -> ShardedSave | ReplicatedSave:
    identity = str(message["identity"])
    if "shards" in message:
        return ShardedSave(identity, tuple(map(str, message["shards"])), bool(message["in_memory"]))
    files = tuple(map(str, message["files"]))
    return ReplicatedSave(identity, int(message["node"]), int(message["nodes"]), files)


def _unsent(arenas: Sequence[Arena], client: Client) -> list[int]:
    """Return the numbers of those arenas whose descriptors a client does not have yet."""
    return [arena.number for arena in arenas if arena.number not in client.sent_arenas]


def _new_fds(arenas: Sequence[Arena], client: Client) -> tuple[int, ...]:
    """Return the descriptors that a client does not have yet, and note that it has them now."""
    new = [arena for arena in arenas if arena.number not in client.sent_arenas]
    client.sent_arenas |= {arena.number for arena in new}
    return tuple(arena.memory.fd for arena in new)


T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue whose `fileno` is readable while there may be something to take."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._receiver.fileno()

    @property
    def wakeup_fd(self) -> int:
        """What to give to `signal.set_wakeup_fd`, so that a signal wakes up the loop, whichever thread receives it."""
        return self._sender.fileno()

    def post(self, item: T) -> None:
        """Add an item and wake up the loop; any thread may call this."""
        self._waiting.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake up the loop; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            self._sender.send(b"x")

    def take(self) -> Iterator[T]:
        """Yield what was posted, oldest first, also what is posted meanwhile."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
        while self._waiting:
            yield self._waiting.popleft()
