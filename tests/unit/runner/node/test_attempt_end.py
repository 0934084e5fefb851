"""How an attempt ends: what a stop request asks of the ranks, and which of several explanations takes precedence."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay, FakeHost, FakeRanks, beat

from checkpointing.agent.events import Committed
from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.journal.attempts import Job
from runner.node.agent_events import AgentEvents
from runner.node.attempt_end import GracefulStop, failure_of, storage_failed
from runner.program.program import Program
from runner.recovery.classify import RankEnd
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind


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
            Job(Program("script", script) if script is not None else None),
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
    bench.host.now += 10.0
    bench.graceful.request()
    assert bench.requests == ["request_stop"] and not bench.graceful.late
    bench.host.now += 20.1
    assert bench.graceful.late


def test_what_there_is_is_committed_once_half_of_the_grace_is_over() -> None:
    bench = Bench(Phase.IDLE)
    for seconds, requests in ((0, []), (14, []), (2, ["commit_newest"]), (2, ["commit_newest"])):
        bench.host.now += seconds
        bench.graceful.request()
        assert bench.requests == ["request_stop", *requests]


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
    bench.graceful.signalled.add(1)
    assert bench.graceful.asked == {1}
    bench.ranks.end(0)
    assert bench.graceful.signalled and bench.graceful.asked == set()
    bench.graceful.signalled.add(0)
    assert bench.graceful.asked == {0}


FINISHED: dict[str, Any] = {"finished": True, "failures": []}
FAILED: dict[str, Any] = {"finished": False, "failures": []}
VERDICT = Failure(FailureKind.HUNG, "rank 1 hung")
OWN = RankEnd(0, 0, 1, "ValueError: bad sample", "f.py:3")
PREEMPTED = RankEnd(0, 0, 75)
KILLED = RankEnd(1, 0, -9)


def ended(*arguments: Any, **known: Any) -> Callable[[], Failure]:
    """An end of which this is known."""
    return partial(failure_of, *arguments, **known)


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (ended(FINISHED), FailureKind.FINISHED, "all ranks finished"),
        # All ranks were done before this runner's verdict, or the limit of failed saves, could end them.
        (ended(FINISHED, verdict=VERDICT), FailureKind.FINISHED, ""),
        (ended(FINISHED, failed_saves=(3, "503"), max_failed_saves=3), FailureKind.FINISHED, ""),
        (ended(FAILED, [OWN], step=5), FailureKind.CRASHED, "bad sample"),
        (ended(FAILED, [OWN], step=5, verdict=VERDICT), FailureKind.HUNG, "rank 1 hung"),
        # Training ends in good order, but because of the storage.
        (
            ended(FAILED, [PREEMPTED], failed_saves=(3, "503"), max_failed_saves=3, stop_known=True),
            FailureKind.STORAGE_FAILED,
            "3 saves in a row failed (checkpoint.max_failed_saves), the last one: 503",
        ),
        (
            ended(FAILED, [OWN], step=5, failed_saves=(2, "503"), max_failed_saves=3),
            FailureKind.CRASHED,
            "sample",
        ),
        (
            ended(FAILED, [PREEMPTED], step=5, stop_known=True),
            FailureKind.PREEMPTED,
            "checkpoint committed",
        ),
        (ended(FAILED, [PREEMPTED], step=5, asked=frozenset({0})), FailureKind.PREEMPTED, ""),
        (ended(FAILED, [PREEMPTED], step=5), FailureKind.CRASHED, "no stop was requested"),
        # A script that ends with 0 after SIGTERM need not have trained to its end.
        (ended(FINISHED, script_signalled=True), FailureKind.PREEMPTED, "in answer to SIGTERM"),
        (ended(FINISHED, stopping=True, step=23, total_steps=40), FailureKind.PREEMPTED, "before its last step"),
        (ended(FINISHED, asked=frozenset({0}), step=23, total_steps=40), FailureKind.PREEMPTED, "after a stop request"),
        (ended(FINISHED, stopping=True, step=23), FailureKind.PREEMPTED, "before its last step"),
        (ended(FINISHED, stopping=True, step=40, total_steps=40), FailureKind.FINISHED, "all ranks finished"),
        # Early stopping, in a run of several nodes.
        (ended(FINISHED, stop_known=True, step=23, total_steps=40), FailureKind.FINISHED, "all ranks finished"),
        (ended({**FAILED, "launcher_lost": True}, [OWN]), FailureKind.LAUNCHER_LOST, "the launcher died"),
        (ended({**FAILED, "fork_server_lost": True}, [KILLED]), FailureKind.LAUNCHER_LOST, "fork server died"),
        (ended({**FAILED, "fork_server_lost": True}, [OWN], step=5), FailureKind.CRASHED, "bad sample"),
        (ended(FAILED), FailureKind.LAUNCHER_LOST, "without a report"),
        (
            ended({**FAILED, "error": "OSError: port taken"}),
            FailureKind.LAUNCHER_LOST,
            "OSError: port taken",
        ),
        (
            ended({**FAILED, "error": "/out/logs/attempt-2 cannot be created: No space left on device"}),
            FailureKind.STORAGE_FAILED,
            "No space left on device; make room",
        ),
        # The launcher's own error explains nothing if a rank has one.
        (ended({**FAILED, "error": "RuntimeError"}, [OWN], step=5), FailureKind.CRASHED, "bad sample"),
        (
            ended(FAILED, [RankEnd(0, 0, -9)], step=5, kernel_oom_kills=1),
            FailureKind.OUT_OF_MEMORY,
            "kernel",
        ),
    ],
)
def test_precedence(end: Callable[[], Failure], kind: FailureKind, text: str) -> None:
    failure = end()
    assert failure.kind is kind and text in failure.cause


def test_a_reserved_status_without_a_stop_request_is_deterministic() -> None:
    """Twice in a row it ends the run, as any other error at the same step."""
    assert failure_of(FAILED, [PREEMPTED], step=5).signature


@pytest.mark.parametrize(("count", "limit", "failed"), [(3, 3, True), (2, 3, False), (9, None, False)])
def test_the_limit_of_failed_saves(count: int, limit: int | None, failed: bool) -> None:
    assert storage_failed((count, "why"), limit) is failed


@pytest.mark.parametrize(
    ("step", "total", "kind"),
    [
        (60, 60, FailureKind.MEMORY_OUTSIDE_STEPS),
        (59, 60, FailureKind.OUT_OF_MEMORY),
        (60, None, FailureKind.OUT_OF_MEMORY),
    ],
)
def test_where_no_step_is_left_smaller_micro_batches_do_not_help(
    step: int, total: int | None, kind: FailureKind
) -> None:
    """A rank that the kernel ended at its exit was tried again seven times, with the batch of no step in halves."""
    failed = {"finished": False, "failures": []}
    end = RankEnd(0, 0, -9, None)
    found = failure_of(failed, [end], step=step, start_step=20, kernel_oom_kills=1, total_steps=total)
    assert found.kind is kind
