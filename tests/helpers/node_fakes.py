"""A host, an event loop, helper processes, a session and nodes for unit tests: time passes when a test says so."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpointing.agent.events import Committed, Event
from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.config.schema import Config
from runner.journal.attempts import AttemptResult, AttemptSpec
from runner.journal.journal import SteadyClock
from runner.journal.run_directory import RunDirectory
from runner.node.agent_events import AgentEvents
from runner.peers.messages import PeerMessage
from runner.ranks.watch import RankWatch, Started
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.requests import Requests
from runner.session.session import Session
from runner.system.event_loop import StopRequest
from runner.system.processes import Host


class FakeHost(Host):
    def __init__(self) -> None:
        self.now = 1000.0
        self.kernel_oom_kills = 0
        # By pid; everything else sleeps.
        self.states: dict[int, str] = {}
        self.sweeps = 0

    def monotonic(self) -> float:
        return self.now

    def oom_kills(self) -> int:
        return self.kernel_oom_kills

    def process_state(self, pid: int) -> str:
        return self.states.get(pid, "S")

    def descendants(self) -> list[Any]:
        return []

    def kill_all(self, find: Callable[[], list[Any]], timeout_s: float = 10.0) -> int:
        self.sweeps += 1
        return 0

    def reap_strays(self, managed: set[int]) -> None:
        pass

    def reap_old(self, managed: set[int]) -> None:
        pass


class FakeLoop:
    """Each wait takes as long as it may, and is followed by what the test has planned next, if anything."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self.plan: list[Callable[[], None]] = []
        self.registered: dict[Any, Callable[[Any], None]] = {}

    def register(self, file: Any, handler: Callable[[Any], None]) -> None:
        self.registered[file] = handler

    def unregister(self, file: Any) -> None:
        self.registered.pop(file, None)

    def pump(self, timeout_s: float) -> None:
        self._host.now += timeout_s
        if self.plan:
            self.plan.pop(0)()

    def every(self, interval_s: float, handler: Callable[[], None]) -> None:
        """Do nothing: the code that waits calls the handler anyway."""


class FakeHelper:
    """A checkpoint agent, or a launcher."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sock = object()
        self.alive, self.closed = True, False
        self.returncode = 0
        self.beats: list[Heartbeat] = []
        self.requests: list[str] = []
        self.sent: list[dict[str, Any]] = []
        # What it had reported and nobody has read.
        self.unread: list[dict[str, Any]] = []
        self.process = SimpleNamespace(socket_path="agent.sock")

    def kill(self) -> None:
        self.alive, self.returncode = False, -9

    def end(self) -> None:
        self.kill()

    def request(self, do: str, **details: Any) -> None:
        self.requests.append(do)

    def last_messages(self) -> list[dict[str, Any]]:
        return self.unread

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        return self.beats[:num_ranks]

    def send(self, message: dict[str, Any]) -> None:
        self.requests.append("launch")
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


class FakeRanks(RankWatch):
    """Ranks that live until the test has them die; `held` ones survive SIGKILL."""

    DEAD_PID = 99

    def __init__(self) -> None:
        super().__init__()
        self.signals: list[signal.Signals] = []
        self.held: set[int] = set()

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.pids[rank], self.local_ranks[rank], self.pidfds[10 + rank] = 100 + rank, rank, 10 + rank
            self.pidfds[10 + rank] = rank

    def started(self, message: Started) -> int | None:
        self.start(message.rank)
        return 10 + message.rank if message.pid != self.DEAD_PID else None

    def died(self, pidfd: int) -> None:
        self.deaths.append(self.pidfds.pop(pidfd))

    def end(self, rank: int) -> None:
        self.died(10 + rank)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.signals.append(number)
        if number is signal.SIGKILL:
            for rank in sorted(set(self.pidfds.values()) - self.held):
                self.end(rank)

    def close(self) -> None:
        self.pidfds.clear()


class FakeDisplay:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.refreshes = 0
        self.state = SimpleNamespace(
            attempt=1,
            step=0,
            total_steps=None,
            loss=None,
            tokens_per_s=None,
            committed_step=None,
            transfer="",
            activity="",
            show_transfer=lambda message: None,
        )

    def message(self, text: str) -> None:
        self.texts.append(text)

    def show(self) -> None:
        pass

    def refresh(self) -> None:
        self.refreshes += 1

    def close(self) -> None:
        pass


class FakeSession(Session):
    """A session without signals, journal and processes.

    Attributes:
        host: Has the time.
        events: What was recorded.
    """

    def __init__(self, folder: Path, **launch: Any) -> None:
        self.host = FakeHost()
        self.config = Config.model_validate(
            {"output_dir": str(folder), "model": {"name_or_path": "model"}, "launch": launch}
        )
        self.directory = RunDirectory(str(folder))
        display: Any = FakeDisplay()
        loop: Any = FakeLoop(self.host)
        self.display, self.loop = display, loop
        self.run_id, self.stop, self.attempt = "run", StopRequest(), 0
        self.clock, self.monotonic, self.runtime = SteadyClock(), self.host.monotonic, folder
        self.events: list[Event] = []
        self.waits: list[float] = []
        self._stop_announced = False
        self.requests = Requests(self.directory.requests, self.stop)

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, event: Event) -> None:
        self.events.append(event)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.host.now += seconds

    def names(self) -> list[str]:
        return [event.name for event in self.events]


class FakeNode:
    """A node whose attempts end as a test has planned.

    Attributes:
        plan: What each attempt does, in order: a result, or something that is called with the node and returns one.
        specs: Of the attempts that were run.
        verdicts: With which others have ended attempts.
        notes: Restart states that were handed over.
        start_errors: Raised by `ensure_processes`, one at each call.
        num_prepared: How often it was to prepare its data.
    """

    def __init__(self, *, display: Any, record: Callable[[Event], None], run_id: str = "run") -> None:
        self.checkpoints = AgentEvents(display, record)
        self.run_id, self.shape = run_id, (1, 2)
        self.others_busy = self.busy = False
        self.is_training, self.is_warm, self.has_state, self.leads, self.pauses = True, True, False, False, 0
        self.saves, self.saves_nothing, self.num_saves_asked = True, False, 0
        self.agent_pid = 1
        self.drained, self.closed, self.has_agent = True, False, True
        self.plan: list[AttemptResult | Callable[[FakeNode], AttemptResult]] = []
        self.specs: list[AttemptSpec] = []
        self.verdicts: list[Failure] = []
        self.stacks: list[bool] = []
        self.notes: list[str] = []
        self.start_errors: list[Exception | None] = []
        self.num_prepared = 0
        self.commits_at_end: int | None = None
        self.each_turn: Callable[[], None] = lambda: None

    def ensure_processes(self) -> None:
        error = self.start_errors.pop(0) if self.start_errors else None
        if error is not None:
            raise error

    def prepare(self) -> None:
        self.num_prepared += 1

    def run_attempt(self, spec: AttemptSpec, each_turn: Callable[[], None]) -> AttemptResult:
        self.specs.append(spec)
        self.each_turn = each_turn
        each_turn()
        planned = self.plan.pop(0)
        return planned if isinstance(planned, AttemptResult) else planned(self)

    def end_attempt(self, verdict: Failure, *, stacks: bool = False) -> None:
        self.verdicts.append(verdict)
        self.stacks.append(stacks)

    def save_now(self) -> int:
        self.num_saves_asked += 1
        return self.checkpoints.committed_step

    def pause_attempt(self) -> None:
        self.pauses += 1

    def commit(self, step: int) -> None:
        self.checkpoints.handle(Committed(step=step))

    def note(self, text: str) -> bool:
        self.notes.append(text)
        return self.has_agent

    def keep_file(self, name: str, path: Path, start: int, end: int) -> bool:
        return True

    def close(self) -> bool:
        self.closed = True
        if self.commits_at_end is not None:
            self.commit(self.commits_at_end)
        return self.drained


class FakeLeader:
    """The leader's port; a test says which nodes are connected, and hands their messages over.

    Attributes:
        present: Node ranks that are connected.
        sent: Messages with the node rank they were for; None for all.
    """

    def __init__(self) -> None:
        self.present: set[int] = set()
        self.sent: list[tuple[int | None, PeerMessage]] = []
        self.closed = False

    def check(self) -> None:
        pass

    def send(self, message: PeerMessage, number: int | None = None) -> None:
        self.sent.append((number, message))

    def close(self) -> None:
        self.closed = True


def ended(kind: FailureKind, step: int = 10, *, cause: str = "why", **fields: Any) -> AttemptResult:
    """An attempt that trained from step 0 and ended this way."""
    return AttemptResult(Failure(kind, cause, step=step, **fields), training_began=1.0, used_manager=True)


def beat(phase: Phase, step: int = 0, *, beats: int = 1, start_step: int = 0, step_s: float = 0.1) -> Heartbeat:
    """A heartbeat of a rank."""
    return Heartbeat(
        phase=phase, step=step, beats=beats, start_step=start_step, step_s=step_s, start_time=1.0, time=2.0
    )
