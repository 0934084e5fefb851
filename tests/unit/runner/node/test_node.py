"""A node from its first process to its last, with helper processes that a test plays."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay, FakeHelper, FakeHost, FakeLoop, beat

from checkpointing.agent import protocol
from checkpointing.agent.events import Committed, Event
from checkpointing.host.heartbeat import Phase
from runner.config.schema import Config
from runner.errors import GpuMissing, UsageError
from runner.journal.attempts import AttemptResult, AttemptSpec, Job
from runner.journal.events import AgentEndedEarly, AttemptStarted, ColdStart
from runner.journal.journal import SteadyClock
from runner.journal.run_directory import RunDirectory
from runner.node.node import Node
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.cache import seal
from runner.system.event_loop import StopRequest

FINISHED: dict[str, Any] = {"event": "attempt_ended", "finished": True, "failures": []}
FAILED: dict[str, Any] = {"event": "attempt_ended", "finished": False, "failures": []}


class Starter:
    """Starts helpers that a test plays."""

    def __init__(self) -> None:
        self.agents: list[FakeHelper] = []
        self.launchers: list[FakeHelper] = []

    def start_agent(self, cancelled: Callable[[], bool]) -> Any:
        self.agents.append(FakeHelper(10 + len(self.agents)))
        return self.agents[-1]

    def start_launcher(self) -> Any:
        self.launchers.append(FakeHelper(20 + len(self.launchers)))
        return self.launchers[-1]


class Bench:
    def __init__(self, folder: Path, **launch: Any) -> None:
        self.host, self.display, self.stop = FakeHost(), FakeDisplay(), StopRequest()
        self.loop, self.starter, self.recorded = FakeLoop(self.host), Starter(), list[Event]()
        self.runtime = folder
        self.turns = 0
        faked: Any = {"loop": self.loop, "display": self.display, "starter": self.starter}
        self.node = Node(
            Config.model_validate({"output_dir": str(folder), "launch": launch}),
            RunDirectory(str(folder)),
            Job(),
            "run",
            record=self.recorded.append,
            clock=SteadyClock(),
            stop=self.stop,
            runtime=folder,
            host=self.host,
            **faked,
        )

    @property
    def agent(self) -> FakeHelper:
        return self.starter.agents[-1]

    @property
    def launcher(self) -> FakeHelper:
        return self.starter.launchers[-1]

    def deliver(self, helper: FakeHelper, message: dict[str, Any]) -> None:
        """Have the node receive a message of a helper."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            protocol.send(theirs, message)
            self.loop.registered[helper.sock](ours)

    def start(self, accelerators: int = 0, *, cuda: bool = False) -> None:
        ready = {"event": "ready", "accelerators": accelerators, "cuda": cuda}
        self.loop.plan.append(lambda: self.deliver(self.launcher, ready))
        self.node.ensure_processes()

    def run(self, *plan: Callable[[], None], spec: AttemptSpec | None = None) -> AttemptResult:
        """Run an attempt: each item happens in a turn of its own, then the agent has handled all messages."""
        over = [lambda: self.deliver(self.agent, {"event": "attempt_over"})]
        self.loop.plan += [*plan, *over]

        def each_turn() -> None:
            self.turns += 1

        return self.node.run_attempt(spec or AttemptSpec(1, 1), each_turn)

    def reported(self, message: dict[str, Any]) -> Callable[[], None]:
        return lambda: self.deliver(self.launcher, message)

    def from_rank(self, **message: Any) -> None:
        """Have the node receive a message of a rank."""
        (sock,) = (file for file in self.loop.registered if isinstance(file, socket.socket))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(json.dumps(message).encode(), str(self.runtime / "events.sock"))
        self.loop.registered[sock](sock)


@pytest.mark.parametrize(("accelerators", "ranks"), [(0, 2), (4, 4)])
def test_the_shape_follows_from_the_accelerators_of_the_launcher(tmp_path: Path, accelerators: int, ranks: int) -> None:
    bench = Bench(tmp_path)
    bench.start(accelerators)
    assert bench.node.shape == (1, ranks)
    assert (bench.node.agent_pid, bench.node.busy) == (10, False)
    bench.agent.alive = False
    assert bench.node.agent_pid == 0


def test_a_promised_gpu_that_torch_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bench = Bench(tmp_path)
    bench.start(0, cuda=True)
    with pytest.raises(GpuMissing):
        _ = bench.node.shape


def test_the_lock_of_a_killed_build_goes_with_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    bench = Bench(tmp_path)
    bench.start()
    path = tmp_path / "extensions" / "fused_adam" / "lock"
    path.parent.mkdir(parents=True)
    bench.run(path.touch, bench.reported(FAILED))
    assert path.exists()
    bench.run(bench.reported(FINISHED), spec=AttemptSpec(2, 1))
    assert not path.exists()


def test_an_attempt_from_its_request_to_its_result(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()

    def train() -> None:
        bench.agent.beats = [beat(Phase.TRAINING, 7), beat(Phase.TRAINING, 6)]

    result = bench.run(train, bench.reported(FINISHED))
    assert (result.failure.kind, result.failure.step, result.used_manager) == (FailureKind.FINISHED, 7, True)
    assert bench.recorded[0] == AttemptStarted(nnodes=1, launcher_pid=20, agent_pid=10)
    assert bench.agent.requests[0] == "begin_attempt" and "end_attempt" in bench.agent.requests
    (request,) = bench.launcher.sent
    assert (request["attempt"], request["nproc_per_node"], request["cold"]) == (1, 2, False)
    assert bench.turns == 2 and bench.host.sweeps, "what ranks leave is ended"
    assert bench.display.state.step == 7


def test_the_next_attempt_knows_what_is_committed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    assert bench.run(bench.reported(FAILED)).failure.kind is FailureKind.LAUNCHER_LOST
    assert not bench.launcher.sent[0]["spec"]["resumes"]
    bench.deliver(bench.agent, Committed(step=5, tier="local").to_dict())
    bench.run(bench.reported(FINISHED))
    assert bench.launcher.sent[1]["spec"]["resumes"]


def test_a_checkpoint_that_was_asked_for_is_asked_for_again_until_there_is_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    steps: list[int] = []

    def ask() -> None:
        bench.agent.beats = [beat(Phase.TRAINING, 7), beat(Phase.TRAINING, 6)]
        steps.append(bench.node.save_now())

    bench.node.leads = True
    bench.run(ask, bench.reported(FAILED))
    assert steps == [7] and bench.agent.requests.count("request_save") == 1
    # An older snapshot is committed meanwhile.
    bench.deliver(bench.agent, Committed(step=5).to_dict())
    bench.run(bench.reported(FAILED), spec=AttemptSpec(2, 1))
    assert bench.agent.requests.count("request_save") == 2
    bench.deliver(bench.agent, Committed(step=8).to_dict())
    bench.run(bench.reported(FINISHED), spec=AttemptSpec(3, 1))
    assert bench.agent.requests.count("request_save") == 2


def test_forks_that_cannot_use_the_gpu_are_followed_by_fresh_interpreters(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": "RuntimeError: Cannot re-initialize CUDA in forked subprocess"}))
    failed = {**FAILED, "failures": [{"rank": 0, "exit_code": 1, "error_file": str(error_file)}]}
    assert bench.run(bench.reported(failed)).failure.may_pass
    bench.run(bench.reported(FINISHED), spec=AttemptSpec(2, 1))
    assert [request["cold"] for request in bench.launcher.sent] == [False, True]
    (cold,) = [event for event in bench.recorded if isinstance(event, ColdStart)]
    assert "Cannot re-initialize CUDA" in cold.reason
    assert any("from now on ranks start as fresh interpreters" in text for text in bench.display.texts)
    # The same error without forks is not retried, and not reported again.
    again = bench.run(bench.reported(failed), spec=AttemptSpec(3, 1)).failure
    assert (again.may_pass, again.in_fork) == (False, False)
    assert [event.name for event in bench.recorded].count(cold.name) == 1


def test_a_rank_of_an_earlier_attempt_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    bench.from_rank(event="stop_signal", in_attempt=1, rank=0)

    def send(number: int) -> Callable[[], None]:
        return lambda: bench.from_rank(event="best_model", in_attempt=number, step=number)

    bench.run(send(1), send(2), bench.reported(FINISHED), spec=AttemptSpec(2, 1))
    assert [event.to_dict() for event in bench.recorded if event.name == "best_model"] == [
        {"event": "best_model", "step": 2}
    ]


def test_a_verdict_ends_the_running_attempt_and_no_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    lost = Failure(FailureKind.NODE_LOST, "node 1 is gone")
    bench.node.end_attempt(lost)

    def end() -> None:
        bench.node.end_attempt(lost)

    assert bench.run(end, bench.reported(FAILED)).failure.kind is FailureKind.NODE_LOST
    assert bench.run(bench.reported(FINISHED)).failure.kind is FailureKind.FINISHED


def test_nodes_that_were_started_with_other_numbers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    with pytest.raises(UsageError, match="started with --nnodes 1, the leader with --nnodes 3"):
        bench.run(spec=AttemptSpec(1, 3))
    assert not bench.recorded


def test_requests_for_the_storage_go_to_the_agent_if_there_is_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert not bench.node.note("state") and not bench.node.keep_file("journal", tmp_path, 0, 1)
    bench.start()
    assert bench.node.note("state") and bench.node.keep_file("journal", tmp_path, 0, 1)
    assert bench.agent.requests == ["restart_state", "sidecar"]


def test_closing_waits_for_the_agent_and_ends_everything(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    bench.loop.plan.append(lambda: setattr(bench.agent, "alive", False))
    assert bench.node.close()
    assert bench.agent.requests == ["shutdown"]
    assert bench.agent.closed and bench.launcher.closed and bench.host.sweeps == 1 and not bench.loop.registered


def test_an_agent_that_does_not_end_is_killed_and_that_is_recorded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    bench.stop.ask("SIGTERM")
    bench.stop.asked_at = bench.host.now
    assert not bench.node.close()
    (event,) = bench.recorded
    assert isinstance(event, AgentEndedEarly) and event.waited_s == pytest.approx(60.0, abs=6)
    assert "what it was writing is not committed" in bench.display.texts[-1]


def test_it_prepares_the_bundled_jobs_data_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    bench.node.prepare()
    folder = RunDirectory(str(tmp_path))
    files = {"config": folder.config, "cache": folder.cache, "log": folder.logs / "prepare.log"}
    (request,) = bench.starter.launchers[0].sent
    assert request == {"prepare": {"limit_s": "600.0", **{name: str(path) for name, path in files.items()}}}
    folder.cache.mkdir()
    (folder.cache / "data.arrow").write_bytes(b"rows")
    seal(folder.cache)
    bench.node.prepare()
    assert len(bench.starter.launchers[0].sent) == 1
