"""The helper processes of a node: when they are started, given up, and waited for."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from helpers.node_fakes import FakeHelper, FakeHost, FakeLoop

from checkpointing.agent import protocol
from checkpointing.agent.events import Committed, RestartStateFailed, StorageRetried, Transfer
from runner.errors import LaunchDelayed, LaunchError
from runner.node.helpers import AgentPulse, Helpers
from runner.system.event_loop import StopRequest


class Bench:
    def __init__(self, quiet_timeout_s: float = 1800.0) -> None:
        self.host, self.stop = FakeHost(), StopRequest()
        self.loop = FakeLoop(self.host)
        self.agents: list[FakeHelper] = []
        self.launchers: list[FakeHelper] = []
        self.timeouts: list[float] = []
        options: Any = {"loop": self.loop, "stop": self.stop, "host": self.host}
        start: Any = {
            "start_agent": lambda cancelled: self._start(self.agents),
            "start_launcher": lambda: self._start(self.launchers),
        }
        self.events: list[str] = []
        self.launcher_messages: list[dict[str, Any]] = []
        self.helpers = Helpers(
            on_agent=lambda event: self.events.append(event.name),
            on_launcher=self.launcher_messages.append,
            on_agent_timeout=self.timeouts.append,
            grace_s=60.0,
            quiet_timeout_s=quiet_timeout_s,
            **start,
            **options,
        )

    @staticmethod
    def _start(helpers: list[FakeHelper]) -> FakeHelper:
        helpers.append(FakeHelper(len(helpers) + 1))
        return helpers[-1]

    def ensure(self, accelerators: int = 0) -> None:
        self.loop.plan.append(lambda: setattr(self.helpers, "accelerators", accelerators))
        self.helpers.ensure()

    def answer(self, message: dict[str, Any]) -> None:
        """The agent says something."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            protocol.send(theirs, message)
            self.helpers._on_agent(ours)


def test_only_a_dead_helper_is_replaced() -> None:
    bench = Bench()
    bench.ensure()
    bench.ensure()
    assert (len(bench.agents), len(bench.launchers)) == (1, 1)
    bench.agents[0].alive = False
    bench.ensure()
    assert (len(bench.agents), len(bench.launchers)) == (2, 1)
    assert bench.agents[0].closed


@pytest.mark.parametrize("at_end", [True, False])
def test_what_an_agent_had_reported_when_it_ended_is_read(at_end: bool) -> None:
    """A checkpoint was committed, and neither journal nor summary had it: the supervisor had been late."""
    bench = Bench()
    bench.ensure()
    bench.agents[0].alive, bench.agents[0].unread = False, [{**Committed(step=7).to_dict()}]
    if at_end:
        assert bench.helpers.close()
    else:
        bench.ensure()
    assert bench.events == ["committed"]


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [(-9, LaunchDelayed, "killed by signal 9"), (1, LaunchError, "ended with status 1 while it loaded torch")],
)
def test_a_launcher_that_dies_while_it_loads(status: int, error: type[Exception], text: str) -> None:
    bench = Bench()

    def die() -> None:
        bench.launchers[0].alive, bench.launchers[0].returncode = False, status

    bench.loop.plan.append(die)
    with pytest.raises(error, match=text):
        bench.helpers.ensure()


def test_a_launcher_that_never_loads_is_given_up() -> None:
    with pytest.raises(LaunchDelayed, match="not loaded torch within 600 s"):
        Bench().helpers.ensure()


def test_a_stop_ends_the_wait_for_the_launcher() -> None:
    bench = Bench()
    bench.loop.plan.append(lambda: bench.stop.ask("SIGTERM"))
    bench.helpers.ensure()
    assert bench.helpers.accelerators is None


@pytest.mark.parametrize(("quiet_timeout_s", "limit_s"), [(1800.0, 120.0), (30.0, 30.0)])
def test_an_agent_that_does_not_answer_is_killed(quiet_timeout_s: float, limit_s: float) -> None:
    bench = Bench(quiet_timeout_s)
    bench.ensure()
    bench.helpers.pulse.restart(bench.host.now)
    began = bench.host.now
    while bench.agents[0].alive:
        bench.host.now += 1.0
        bench.helpers.pulse.turn(bench.host.now)
        bench.helpers.ping_agent(bench.host.now)
    assert limit_s < bench.host.now - began <= limit_s + 2
    assert bench.agents[0].requests.count("ping") == pytest.approx(limit_s / 2, abs=2)


def test_a_suspended_node_does_not_blame_its_agent() -> None:
    bench = Bench()
    bench.ensure()
    bench.helpers.pulse.restart(bench.host.now)
    bench.host.now += 4000.0
    assert bench.helpers.pulse.turn(bench.host.now) == pytest.approx(4000.0)
    bench.helpers.ping_agent(bench.host.now)
    assert bench.agents[0].alive


@pytest.mark.parametrize(
    ("message", "is_progress"),
    [
        (Committed(step=3).to_dict(), True),
        (Transfer(step=3, what="upload", done=1, total=2).to_dict(), True),
        ({"event": "pong"}, False),
        (StorageRetried(tier="remote", count=3, reason="503").to_dict(), False),
        (RestartStateFailed(tier="remote", error="503").to_dict(), False),
    ],
)
def test_an_agent_that_only_complains_gets_nowhere(message: dict[str, Any], is_progress: bool) -> None:
    """It is not waited for because storage that hangs makes it say so every minute."""
    bench = Bench()
    bench.ensure()

    def answer() -> None:
        bench.answer(message)
        bench.helpers.pulse.answered(bench.host.now)

    bench.loop.plan += [answer] * 13_000  # 650 s
    drained = bench.helpers.wait_for_agent(lambda: bench.host.now > 1640.0)
    assert drained is is_progress and bool(bench.timeouts) is not is_progress


def test_a_stop_gives_the_agent_its_grace_and_no_more() -> None:
    bench = Bench()
    bench.ensure()
    bench.stop.ask("SIGTERM")
    bench.stop.asked_at = bench.host.now
    assert not bench.helpers.wait_for_agent(lambda: False)
    assert bench.timeouts == [pytest.approx(60.0, abs=0.1)] and not bench.agents[0].alive


def test_the_end_of_an_attempt_is_when_its_messages_are_handled() -> None:
    bench = Bench()
    bench.ensure()
    bench.loop.plan += [lambda: None, lambda: bench.answer({"event": "attempt_over"})]
    bench.helpers.end_attempt()
    assert bench.agents[0].requests[0] == "end_attempt" and not bench.timeouts and not bench.loop.plan


def test_an_agent_that_ends_by_itself_has_committed_everything() -> None:
    bench = Bench()
    bench.ensure()
    bench.loop.plan.append(lambda: setattr(bench.agents[0], "alive", False))
    assert bench.helpers.close()
    assert bench.agents[0].requests == ["shutdown"] and bench.helpers.agent is None


def test_requests_to_no_agent_are_reported() -> None:
    bench = Bench()
    assert not bench.helpers.request_agent("restart_state", text="")
    bench.ensure()
    assert bench.helpers.request_agent("restart_state", text="")


@pytest.mark.parametrize(("accelerators", "checks"), [(0, 0), (4, 1)])
def test_gpus_are_checked_where_there_are_any(accelerators: int, checks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, done = Bench(), list[int]()
    monkeypatch.setattr(bench.helpers, "_check_gpus", lambda: done.append(1))
    bench.ensure(accelerators)
    assert len(done) == checks


def test_a_launcher_says_when_it_is_warm_and_the_next_one_is_not() -> None:
    bench = Bench()
    bench.ensure()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        protocol.send(theirs, {"event": "warm"})
        assert not bench.helpers.is_warm
        bench.helpers._on_launcher(ours)
    assert bench.helpers.is_warm and bench.launcher_messages == []
    bench.helpers.prepare({"cache": "there"})
    assert bench.launchers[0].sent == [{"prepare": {"cache": "there"}}] and not bench.helpers.is_warm
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        protocol.send(theirs, {"event": "prepared"})
        bench.helpers._on_launcher(ours)
    assert bench.helpers.is_warm
    bench.helpers.prepare({})
    bench.launchers[0].alive = False
    bench.ensure()
    assert not bench.helpers.is_warm


@pytest.mark.parametrize(("quiet_timeout_s", "limit_s"), [(1800.0, 120.0), (30.0, 30.0)])
def test_an_answer_is_overdue_after_the_limit(quiet_timeout_s: float, limit_s: float) -> None:
    pulse = AgentPulse(quiet_timeout_s, 1000.0)
    assert not pulse.is_silent(1000.0 + limit_s) and pulse.is_silent(1000.1 + limit_s)
    pulse.answered(1010.0)
    assert not pulse.is_silent(1010.0 + limit_s) and pulse.is_silent(1010.1 + limit_s)


def test_pings_are_sent_every_two_seconds() -> None:
    pulse = AgentPulse(60.0, 1000.0)
    assert [pulse.ping_due(1000.0 + second) for second in range(1, 6)] == [False, True, False, True, False]


def test_a_time_without_turns_counts_against_nobody() -> None:
    pulse = AgentPulse(30.0, 1000.0)
    assert pulse.turn(1003.0) == 0.0
    assert pulse.turn(1503.0) == 500.0
    assert not pulse.is_silent(1529.0) and pulse.is_silent(1531.0)


def test_a_new_attempt_restarts_the_time_to_answer() -> None:
    pulse = AgentPulse(30.0, 1000.0)
    pulse.restart(1500.0)
    assert pulse.turn(1501.0) == 0.0 and not pulse.is_silent(1530.0)


def test_only_progress_puts_off_the_time_to_give_up() -> None:
    pulse = AgentPulse(30.0, 1000.0)
    pulse.answered(1500.0)
    assert pulse.give_up_at == 1600.0
    pulse.progressed(1500.0)
    assert pulse.give_up_at == 2100.0
