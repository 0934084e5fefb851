"""What a follower does when its leader speaks, is silent, or is gone, without a connection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeNode, FakeSession, ended

from checkpointing.agent.events import Committed, Log, TrainingStarted
from checkpointing.storage import LocalStorage
from runner.errors import ExitCode, LaunchDelayed
from runner.journal.attempts import AttemptResult, AttemptSpec, Job
from runner.lease.leadership import Inherited, Takeover
from runner.lease.lease import LeaseRecord
from runner.peers.auth import ensure_secret
from runner.peers.messages import (
    Begin,
    Busy,
    End,
    Ended,
    Finish,
    Forwarded,
    Hello,
    PeerMessage,
    Ready,
    StopRun,
    Welcome,
)
from runner.program.program import Program
from runner.ranks.watch import RankEvents
from runner.recovery.kinds import FailureKind
from runner.recovery.restart_state import FINISHED_PATIENCE_S, RestartState
from runner.session.bad_machines import this_machine
from runner.session.identity import JobIdentity, key_of
from runner.supervisor.follower import _STOP_PATIENCE_S, Follower

OURS = JobIdentity({"job": "the configured job", "data.path": "a.parquet"})
LONGER = JobIdentity({**OURS.what, "trainer.max_steps": 200})


class FakeMember:
    """The connection to a leader."""

    def __init__(self) -> None:
        self.connected = True
        self.own_host = "10.0.0.2"
        self.address = ("10.0.0.1", 29401)
        self.last_error = "Connection refused"
        self.sent: list[PeerMessage] = []

    def check(self) -> None:
        pass

    def send(self, message: PeerMessage) -> None:
        self.sent.append(message)

    def follow(self, address: tuple[str, int]) -> None:
        self.address = address

    def close(self) -> None:
        pass


class FakeWatch:
    """What the lease tells.

    Attributes:
        newest: The newest lease.
        taken: What this node has taken, once it looks.
        seen: How it was asked.
    """

    def __init__(self) -> None:
        self.newest: LeaseRecord | None = None
        self.taken: LeaseRecord | None = None
        self.seen: list[tuple[bool, str, str]] = []
        self.epochs: list[int] = []

    def followed(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def turn(self, now: float, *, has_state: bool, host: Callable[[], str], run_id: str) -> LeaseRecord | None:
        self.seen.append((has_state, host(), run_id))
        return self.taken


class Bench:
    """A follower whose leader does what a test has planned, one thing at each turn of the loop."""

    def __init__(self, folder: Path, *plan: PeerMessage | Callable[[], object], script: str | None = None) -> None:
        launch = {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": 29400}
        self.session = FakeSession(folder, **launch)
        self.member = FakeMember()
        self.nodes: list[FakeNode] = []
        self.attempts: list[AttemptResult | Callable[[FakeNode], AttemptResult]] = []
        self.start_errors: list[Exception | None] = []
        self.watch, self.led = FakeWatch(), list[tuple[LeaseRecord, Inherited]]()
        watch: Any = self.watch
        self.follower = Follower(
            self.session,
            Job(Program("script", script) if script is not None else None),
            identity=OURS,
            takeover=Takeover(self.session, watch, self._lead),
            build_node=self._build_node,
            connect=self._connect,
        )
        loop: Any = self.session.loop
        loop.plan = [self._step(one) for one in plan]

    def _lead(self, lease: LeaseRecord, inherited: Inherited) -> ExitCode:
        self.led.append((lease, inherited))
        node: Any = inherited.node
        if node is not None:
            assert not node.closed, "it keeps its snapshots"
            node.close()
        return ExitCode.DONE

    def _step(self, planned: PeerMessage | Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            if isinstance(planned, PeerMessage):
                self.follower._on_message(planned)  # type: ignore[arg-type]
            else:
                planned()

        return step

    def _connect(self, address: object, hello: Hello, *_: object, read_secret: Callable[[], bytes | None]) -> Any:
        self.read_secret = read_secret
        self.hello = hello
        return self.member

    def _build_node(self, *arguments: Any, **options: Any) -> Any:
        node = FakeNode(display=options["display"], record=options["record"], run_id=arguments[3])
        node.plan, node.start_errors = self.attempts, self.start_errors
        self.nodes.append(node)
        return node

    def run(self) -> ExitCode:
        exit_code = self.follower.run()
        assert all(node.closed for node in self.nodes)
        return exit_code


WELCOME, BEGIN = Welcome(run_id="run"), Begin(spec=AttemptSpec(1, 2))
DONE = Finish(exit_code=0, reason="all ranks finished")


def test_it_introduces_itself_with_its_job(tmp_path: Path) -> None:
    assert Bench(tmp_path).hello == Hello(node_rank=1, job=OURS.to_json().decode(), machine=this_machine())


def test_an_attempt_is_run_when_the_leader_begins_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, DONE)
    bench.attempts = [ended(FailureKind.FINISHED)]
    assert bench.run() is ExitCode.DONE
    assert bench.nodes[0].specs == [AttemptSpec(1, 2)]
    assert [type(message) for message in bench.member.sent] == [Ready, Ended, Ready]
    assert bench.session.names() == ["run_started", "attempt_ended", "run_ended"]


def test_a_signal_to_a_follower_has_its_ranks_ask_for_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, DONE)
    bench.attempts = [ended(FailureKind.FINISHED)]
    bench.session.requests._saves.append("SIGUSR2")
    assert bench.run() is ExitCode.DONE and bench.nodes[0].num_saves_asked == 1
    # Which files there are is the leader's to see.
    assert not bench.session.directory.requests.exists()


def test_it_ends_as_the_leader_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Finish(exit_code=2, reason="another job"))
    assert bench.run() is ExitCode.USAGE


def test_the_leaders_word_ends_its_ranks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, DONE)

    def attempt(node: FakeNode) -> AttemptResult:
        bench.follower._on_message(End(attempt=1, stacks=True))
        node.each_turn()
        return ended(FailureKind.ENDED)

    bench.attempts = [attempt]
    bench.run()
    assert [(verdict.kind, bench.nodes[0].stacks) for verdict in bench.nodes[0].verdicts] == [
        (FailureKind.ENDED, [True])
    ]


def test_the_end_of_another_attempt_ends_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, DONE)

    def attempt(node: FakeNode) -> AttemptResult:
        bench.follower._on_message(End(attempt=7, stacks=False))
        node.each_turn()
        return ended(FailureKind.FINISHED)

    bench.attempts = [attempt]
    bench.run()
    assert bench.nodes[0].verdicts == []


def test_a_leader_that_is_lost_ends_its_ranks_and_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN)
    loop: Any = bench.session.loop

    def attempt(node: FakeNode) -> AttemptResult:
        bench.member.connected = False
        node.each_turn()
        bench.member.connected = True
        loop.plan = [bench._step(WELCOME), bench._step(DONE)]
        return ended(FailureKind.NODE_LOST)

    bench.attempts = [attempt]
    assert bench.run() is ExitCode.DONE
    assert [verdict.kind for verdict in bench.nodes[0].verdicts] == [FailureKind.NODE_LOST]
    assert len(bench.nodes) == 1, "its agent keeps the snapshots"


def test_a_leader_of_another_run_gets_a_new_node(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, Welcome(run_id="other"))
    loop: Any = bench.session.loop

    def attempt(node: FakeNode) -> AttemptResult:
        bench.member.connected = False
        node.each_turn()
        bench.member.connected = True
        loop.plan = [bench._step(Welcome(run_id="other")), bench._step(DONE)]
        return ended(FailureKind.NODE_LOST)

    bench.attempts = [attempt]
    bench.run()
    assert [node.run_id for node in bench.nodes] == ["run", "other"]


def test_a_leader_that_never_answers_ends_it_with_76(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path)
    bench.member.connected = False
    assert bench.run() is ExitCode.BUDGET_SPENT
    text = capsys.readouterr().err
    assert "the leader at 127.0.0.1:29401 has not answered for" in text and "Connection refused" in text


def test_a_stop_request_is_passed_on_and_the_answer_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda: bench.session.stop.ask("SIGTERM"))
    assert bench.run() is ExitCode.PREEMPTED
    assert bench.member.sent == [StopRun(reason="SIGTERM")]
    assert bench.session.host.now >= 1000.0 + _STOP_PATIENCE_S


def test_after_a_good_end_the_others_have_the_grace_period_to_save(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN)

    def attempt(node: FakeNode) -> AttemptResult:
        bench.session.stop.ask("SIGTERM")
        return ended(FailureKind.PREEMPTED)

    bench.attempts = [attempt]
    assert bench.run() is ExitCode.PREEMPTED
    assert bench.session.host.now >= 1000.0 + _STOP_PATIENCE_S + bench.session.config.restart.grace_s


def test_a_stop_request_without_a_leader_ends_it_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda: bench.session.stop.ask("SIGTERM"))
    bench.member.connected = False
    assert bench.run() is ExitCode.PREEMPTED
    assert bench.session.host.now < 1002.0


def test_the_leaders_stop_request_is_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, StopRun(reason="node 0: SIGTERM"), Finish(exit_code=75, reason="stopped on request"))
    assert bench.run() is ExitCode.PREEMPTED
    assert bench.session.stop.reason == "node 0: SIGTERM"


def test_a_helper_that_is_killed_is_restarted_within_the_budget(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, DONE)
    bench.start_errors = [LaunchDelayed("killed by signal 9")] * 2
    assert bench.run() is ExitCode.DONE
    bench = Bench(tmp_path, WELCOME)
    bench.session.config.restart.max_restarts = 1
    bench.start_errors = [LaunchDelayed("killed by signal 9")] * 2
    assert bench.run() is ExitCode.BUDGET_SPENT


def test_events_that_only_rank_0_reports_reach_the_leader(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, DONE)

    def attempt(node: FakeNode) -> AttemptResult:
        node.checkpoints.handle(TrainingStarted(step=0, total_steps=20))
        node.checkpoints.handle(TrainingStarted(step=0))
        node.checkpoints.handle(Log(step=1, loss=3.0))
        node.checkpoints.handle(Committed(step=1))
        return ended(FailureKind.FINISHED)

    bench.attempts = [attempt]
    bench.run()
    forwarded = [message.event.name for message in bench.member.sent if isinstance(message, Forwarded)]
    assert forwarded == ["training_started", "log"]


def test_the_leader_learns_when_it_is_busy(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME, BEGIN, DONE)

    def attempt(node: FakeNode) -> AttemptResult:
        for node.busy in (True, True, False):
            node.each_turn()
        bench.follower._on_message(Busy(busy=True))
        assert node.others_busy
        return ended(FailureKind.FINISHED)

    bench.attempts = [attempt]
    bench.run()
    assert [message for message in bench.member.sent if isinstance(message, Busy)] == [
        Busy(busy=True),
        Busy(busy=False),
    ]


@pytest.mark.parametrize(("finished", "is_done"), [(OURS, True), (LONGER, False)])
def test_a_follower_that_finds_nobody_looks_at_the_restart_state(
    finished: JobIdentity, is_done: bool, tmp_path: Path
) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    storage.root.mkdir()
    storage.sidecars.replace_restart_state(RestartState(finished=key_of(finished)).to_json(3).encode())
    bench = Bench(tmp_path)
    bench.member.connected = False
    assert bench.run() is (ExitCode.DONE if is_done else ExitCode.BUDGET_SPENT)
    assert not is_done or bench.session.host.now < 1000.0 + FINISHED_PATIENCE_S + 2


def test_a_follower_may_open_its_sockets_again_in_the_same_folder(tmp_path: Path) -> None:
    """Its leader was replaced, so that another run begins: `Address already in use` ended it."""
    RankEvents(tmp_path).close()
    again = RankEvents(tmp_path)
    assert again.receive() == []
    again.close()


def test_the_secret_is_read_where_the_leader_writes_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.read_secret() is None
    secret = ensure_secret(bench.session.config.tiers.durable)
    assert bench.read_secret() == secret


def test_a_secret_that_is_too_short_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was tried again until the time-out, and then 76."""
    bench = Bench(tmp_path)
    bench.member.connected = False
    monkeypatch.setenv("RUNNER_SECRET", "short")
    began = bench.session.host.now
    assert bench.run() is ExitCode.USAGE
    assert bench.session.host.now == began
    assert "RUNNER_SECRET has 5 characters; use 16 or more" in capsys.readouterr().err


def test_it_is_ready_once_ranks_can_start_without_delay(tmp_path: Path) -> None:
    """The attempt of the others may be paused for this node alone: it stood for the two seconds of its imports."""
    bench = Bench(tmp_path, WELCOME)
    loop: Any = bench.session.loop

    def loading() -> None:
        bench.nodes[0].is_warm = False

    def not_ready() -> None:
        assert bench.member.sent == []

    def loaded() -> None:
        bench.nodes[0].is_warm = True

    make = bench._build_node

    def make_cold(*arguments: Any, **options: Any) -> Any:
        node = make(*arguments, **options)
        node.is_warm = False
        return node

    bench.follower._build_node = make_cold
    loop.plan += [loading, not_ready, not_ready, loaded, bench._step(DONE)]
    assert bench.run() is ExitCode.DONE
    assert bench.member.sent == [Ready(nproc=2)]


@pytest.mark.parametrize("running", [True, False])
def test_it_prepares_its_data_before_the_others_wait_for_it(running: bool, tmp_path: Path) -> None:
    """They stood still for as long as tokenising took on a node that had just come."""
    bench = Bench(tmp_path, Welcome(run_id="run", running=running), BEGIN, DONE)
    bench.attempts = [ended(FailureKind.FINISHED)]
    prepared: list[int] = []
    send = bench.member.send

    def sent(message: PeerMessage) -> None:
        if isinstance(message, Ready):
            prepared.append(bench.nodes[0].num_prepared)
        send(message)

    bench.member.send = sent  # type: ignore[method-assign]
    bench.run()
    assert prepared == ([1, 1] if running else [0, 0])


def test_another_leader_while_it_loads_gets_a_node_of_its_own_run(tmp_path: Path) -> None:
    """Nodes of two runs never meet: seen in a campaign, where the leader stood still just as this node came back."""
    bench = Bench(tmp_path, WELCOME)
    make = bench._build_node

    def make_cold(*arguments: Any, **options: Any) -> Any:
        node = make(*arguments, **options)
        node.is_warm = len(bench.nodes) > 1
        return node

    def replaced() -> None:
        lose_leader(bench)
        bench.follower._turn()
        bench.member.connected = True
        bench.follower._on_message(Welcome(run_id="other"))
        bench.nodes[0].is_warm = True

    bench.follower._build_node = make_cold
    loop: Any = bench.session.loop
    loop.plan += [replaced, lambda: None, bench._step(BEGIN), bench._step(DONE)]
    bench.attempts = [ended(FailureKind.ENDED)]
    assert bench.run() is ExitCode.DONE
    assert [(node.run_id, len(node.specs)) for node in bench.nodes] == [("run", 0), ("other", 1)]
    assert [type(message) for message in bench.member.sent] == [Ready, Ended, Ready]


def test_a_leader_that_is_met_again_at_once_learns_that_it_is_ready(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WELCOME)

    def again() -> None:
        lose_leader(bench)
        bench.follower._turn()
        bench.member.connected = True
        bench.follower._on_message(WELCOME)

    loop: Any = bench.session.loop
    loop.plan += [lambda: None, again, lambda: None, bench._step(DONE)]
    assert bench.run() is ExitCode.DONE
    assert bench.member.sent == [Ready(nproc=2), Ready(nproc=2)] and len(bench.nodes) == 1


def lose_leader(bench: Bench) -> None:
    bench.member.connected = False


def test_a_node_whose_leader_is_gone_leads_with_what_it_holds(tmp_path: Path) -> None:
    lease = LeaseRecord(2, "b", "b1", 1, "10.0.0.2", "run")
    bench = Bench(tmp_path, Welcome(run_id="run", epoch=1), Begin(spec=AttemptSpec(1, 3, nodes=(0, 1, 2))))

    def attempt(node: FakeNode) -> AttemptResult:
        bench.member.connected = False
        node.has_state = True
        node.each_turn()
        bench.watch.taken = lease
        return ended(FailureKind.NODE_LOST)

    bench.attempts = [attempt]
    assert bench.run() is ExitCode.DONE
    node: Any = bench.nodes[0]
    assert bench.led == [(lease, Inherited(node, frozenset({1, 2})))] and bench.watch.epochs == [1]
    assert bench.watch.seen[-1] == (True, "10.0.0.2", "run")
    assert "run_ended" not in bench.session.names(), "the session goes on"
    # What the node reports from now on is for its own journal.
    sent = len(bench.member.sent)
    bench.follower._record(Committed(step=1, tier="local"))
    assert len(bench.member.sent) == sent and bench.session.names()[-1] == "committed"


def test_a_node_that_has_met_no_leader_leads_with_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    lose_leader(bench)
    bench.watch.taken = LeaseRecord(2, "b", "b1", 1)
    assert bench.run() is ExitCode.DONE
    assert bench.led == [(bench.watch.taken, Inherited())]


def test_a_node_that_has_met_no_leader_continues_the_same_run(tmp_path: Path) -> None:
    """The others keep what they hold in memory only for the run that they know."""
    bench = Bench(tmp_path, DONE)
    lose_leader(bench)
    bench.watch.newest = LeaseRecord(2, "c", "c1", 2, "10.0.0.3", "theirs", released=True)
    bench.run()
    assert bench.watch.seen[-1][2] == "theirs"


def test_it_connects_to_the_node_that_leads_now(tmp_path: Path) -> None:
    bench = Bench(tmp_path, DONE)
    lose_leader(bench)
    bench.watch.newest = LeaseRecord(2, "c", "c1", 2, "10.0.0.3", "run")
    assert bench.run() is ExitCode.DONE
    assert bench.member.address == ("10.0.0.3", 29401)


def test_a_leader_that_has_ended_is_not_connected_to(tmp_path: Path) -> None:
    bench = Bench(tmp_path, DONE)
    lose_leader(bench)
    bench.watch.newest = LeaseRecord(2, "c", "c1", 2, "10.0.0.3", "run", released=True)
    bench.run()
    assert bench.member.address == ("10.0.0.1", 29401)


def test_a_node_that_is_to_stop_does_not_lead(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    lose_leader(bench)
    bench.watch.taken = LeaseRecord(2, "b", "b1", 1)
    bench.session.stop.ask("SIGTERM")
    assert bench.run() is ExitCode.PREEMPTED
    assert not bench.led and not bench.watch.seen
