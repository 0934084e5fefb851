"""A stop request: what is asked of the ranks, for how long they are waited for, and when that is pointless."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay, FakeHost, FakeRanks, beat

from checkpointing.agent.events import Committed
from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.journal.attempts import Job
from runner.node.agent_events import AgentEvents
from runner.node.graceful_stop import GracefulStop


class Bench:
    """Two ranks, and whatever asks them to stop."""

    def __init__(self, *phases: Phase, script: str | None = None) -> None:
        self.host, self.display, self.ranks = FakeHost(), FakeDisplay(), FakeRanks()
        self.requests: list[str] = []
        self.beats: list[Heartbeat] = [beat(phase) for phase in phases]
        display: Any = self.display
        self.checkpoints = AgentEvents(display, lambda event: None)
        helpers: Any = self
        self.graceful = GracefulStop(
            Job(script),
            30.0,
            ranks=self.ranks,
            helpers=helpers,
            checkpoints=self.checkpoints,
            display=display,
            host=self.host,
            heartbeats=lambda: self.beats,
        )

    def request_agent(self, do: str) -> bool:
        self.requests.append(do)
        return True


def test_the_flag_is_set_once_and_the_grace_period_begins_with_it() -> None:
    bench = Bench(Phase.TRAINING)
    assert not bench.graceful.requested and not bench.graceful.late
    bench.graceful.request()
    bench.host.now += 20.0
    bench.graceful.request()
    assert bench.requests == ["request_stop"] and not bench.graceful.late
    bench.host.now += 10.1
    assert bench.graceful.late


@pytest.mark.parametrize(("phases", "signalled"), [([Phase.STARTING] * 2, True), ([Phase.STARTING, Phase.DONE], False)])
def test_only_a_script_without_our_checkpoints_gets_sigterm(phases: list[Phase], signalled: bool) -> None:
    bench = Bench(*phases, script="train.py")
    bench.graceful.request()
    assert bench.graceful.script_signalled is signalled
    assert bench.ranks.signals == ([signal.SIGTERM] if signalled else [])


def test_the_bundled_job_gets_no_sigterm() -> None:
    bench = Bench(Phase.STARTING)
    bench.graceful.request()
    assert not bench.ranks.signals


@pytest.mark.parametrize(("commit_s", "shown"), [(31.0, True), (29.0, False)])
def test_a_grace_period_that_is_too_short_is_pointed_out(commit_s: float, shown: bool) -> None:
    bench = Bench(Phase.TRAINING)
    bench.checkpoints.handle(Committed(step=4, tier="remote", duration_s=commit_s))
    bench.graceful.request()
    assert any("it may not finish; step 4 is safe" in text for text in bench.display.texts) is shown


@pytest.mark.parametrize(
    ("phases", "script", "running", "worthwhile"),
    [
        ([Phase.STARTING, Phase.RESTORING], None, True, False),
        ([Phase.STARTING, Phase.TRAINING], None, True, True),
        # A script may handle the signal itself, as long as there is one.
        ([Phase.STARTING], "train.py", True, True),
        ([Phase.STARTING], "train.py", False, False),
    ],
)
def test_when_waiting_can_save_anything(
    phases: list[Phase], script: str | None, running: bool, worthwhile: bool
) -> None:
    bench = Bench(*phases, script=script)
    if running:
        bench.ranks.start(0)
    assert bench.graceful.worthwhile is worthwhile


def test_signals_that_torchrun_sends_after_a_death_are_no_stop_request() -> None:
    bench = Bench(Phase.TRAINING)
    bench.ranks.start(0, 1)
    bench.graceful.on_signal(1)
    assert bench.graceful.asked == {1}
    bench.ranks.end(0)
    assert bench.graceful.signalled and bench.graceful.asked == set()
    bench.graceful.on_signal(0)
    assert bench.graceful.asked == {0}
