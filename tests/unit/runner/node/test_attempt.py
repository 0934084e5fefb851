"""What a node answers while an attempt runs, decision by decision: no process is started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay, FakeHelper, FakeHost, FakeLoop, FakeRanks, beat

from checkpointing.agent.events import (
    CommitFailedEvent,
    Committed,
    Event,
    FencedEvent,
    SnapshotDamaged,
    SnapshotDropped,
)
from checkpointing.host.heartbeat import Phase
from runner.config.schema import Config
from runner.journal.attempts import AttemptResult, AttemptSpec, Job
from runner.journal.events import BestModel, RankStarted
from runner.node.agent_events import AgentEvents
from runner.node.attempt import Attempt
from runner.node.helpers import Helpers
from runner.program.program import Program
from runner.ranks.watch import BestModelWritten, Done, Failed, PreemptedRank, RankMessage, Started, StopSignal
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.event_loop import StopRequest


@dataclass
class Bench:
    """An attempt of two ranks, and everything around it."""

    config: Config = field(default_factory=Config)
    job: Job = field(default_factory=Job)
    logs: Path = Path("/nonexistent")

    def __post_init__(self) -> None:
        self.host, self.stop, self.display = FakeHost(), StopRequest(), FakeDisplay()
        self.loop = FakeLoop(self.host)
        self.agent, self.launcher = FakeHelper(1), FakeHelper(2)
        self.events: list[Event] = []
        display: Any = self.display
        self.checkpoints = AgentEvents(display, self.record)
        shared: Any = {"loop": self.loop, "stop": self.stop, "host": self.host}
        start: Any = {"start_agent": lambda cancelled: self.agent, "start_launcher": lambda: self.launcher}
        restart = self.config.restart
        self.helpers = Helpers(
            on_agent=self.checkpoints.handle,
            on_launcher=lambda message: None,
            on_agent_timeout=lambda waited_s: None,
            grace_s=restart.grace_s,
            quiet_timeout_s=restart.quiet_timeout_s,
            **start,
            **shared,
        )
        self.helpers.agent, self.helpers.launcher = self.agent, self.launcher  # type: ignore[assignment]
        self.ranks = FakeRanks()
        # What ranks have sent and nobody has read.
        self.unread: list[RankMessage] = []
        ranks: Any = self.ranks
        self.attempt = Attempt(
            AttemptSpec(1, 1),
            config=self.config,
            job=self.job,
            nproc=2,
            log_dir=self.logs,
            helpers=self.helpers,
            checkpoints=self.checkpoints,
            display=display,
            record=self.record,
            clock=lambda: 5000.0 + self.host.now,
            read_rank_messages=self.read,
            ranks=ranks,
            **shared,
        )

    def record(self, event: Event) -> None:
        self.events.append(event)

    def read(self) -> None:
        while self.unread:
            self.attempt.on_rank(self.unread.pop(0))

    def start(self, rank: int, pid: int = 10) -> None:
        """A rank says that it is running."""
        self.attempt.on_rank(
            Started(event="rank_started", in_attempt=1, rank=rank, local_rank=rank, pid=pid, error_file="/l/0/e.json")
        )

    def train(self, step: int = 5) -> None:
        """Two ranks in mid-training."""
        self.ranks.start(0, 1)
        self.agent.beats = [beat(Phase.TRAINING, step), beat(Phase.TRAINING, step)]

    def turn(self, seconds: float = 0.5, *, others_busy: bool = False) -> None:
        self.host.now += seconds
        self.helpers.pulse.answered(self.host.now)
        self.attempt.turn(others_busy=others_busy)

    def turns(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Turns of a second until so much time has passed, or the attempt is over."""
        until = self.host.now + seconds
        while self.host.now < until and self.attempt.result is None:
            each()
            self.turn(1.0)

    def result(self) -> AttemptResult:
        """Let the attempt come to its end, at most 10 s later."""
        self.turns(10)
        self.attempt.close()
        return self.attempt.conclude(lambda machine_time: machine_time)


def finish(bench: Bench) -> None:
    bench.ranks.done |= {0, 1}
    for rank in list(bench.ranks.pidfds.values()):
        bench.ranks.end(rank)
    bench.attempt.on_launcher({"finished": True, "failures": []})


def test_ranks_that_end_well_have_finished() -> None:
    bench = Bench()
    bench.train(step=7)
    finish(bench)
    bench.turn()
    result = bench.result()
    assert (result.failure.kind, result.failure.step, result.failed_at) == (FailureKind.FINISHED, 7, 0.0)


def test_the_others_are_killed_once_a_rank_has_died_of_itself() -> None:
    bench = Bench()
    bench.train()
    bench.ranks.errors[1] = ("ValueError: bad sample", None, False)
    bench.ranks.end(1)
    bench.turn()
    assert bench.ranks.signals == [signal.SIGKILL]
    assert bench.attempt.failed_at > 5000


def test_a_rank_that_blames_another_one_gives_it_time_to_say_why() -> None:
    bench = Bench()
    bench.train()
    bench.ranks.errors[1] = ("RuntimeError: Connection closed by peer", None, False)
    bench.ranks.end(1)
    bench.turn()
    assert not bench.ranks.signals
    bench.turn(0.6)
    assert bench.ranks.signals == [signal.SIGKILL]


def test_a_stop_request_reaches_the_ranks_once_and_waits_for_the_grace_period() -> None:
    bench = Bench(Config(restart={"grace_s": 30}))  # type: ignore[arg-type]
    bench.train()
    bench.stop.ask("SIGTERM")
    bench.turn()
    bench.turn()
    assert bench.agent.requests.count("request_stop") == 1 and not bench.ranks.signals
    bench.turns(31)
    assert bench.ranks.signals and bench.result().failure.kind is FailureKind.ENDED


def test_a_second_signal_ends_the_grace_period() -> None:
    bench = Bench()
    bench.train()
    bench.stop.ask("SIGTERM")
    bench.turn()
    assert not bench.ranks.signals
    bench.stop._hurried_at = 0.0
    bench.turn()
    assert bench.ranks.signals == [signal.SIGKILL] and bench.result().failure.kind is FailureKind.ENDED


def test_a_stop_before_training_has_begun_waits_for_nothing() -> None:
    bench = Bench()
    bench.ranks.start(0, 1)
    bench.agent.beats = [beat(Phase.STARTING), beat(Phase.RESTORING)]
    bench.stop.ask("SIGTERM")
    bench.turn()
    assert bench.ranks.signals == [signal.SIGKILL]


def test_a_script_without_checkpoints_is_told_to_stop_as_torchrun_would_tell_it() -> None:
    bench = Bench(job=Job(Program("script", "train.py")))
    bench.ranks.start(0, 1)
    bench.agent.beats = [beat(Phase.STARTING, beats=0), beat(Phase.STARTING, beats=0)]
    bench.stop.ask("SIGTERM")
    bench.turn()
    assert bench.ranks.signals == [signal.SIGTERM]
    finish(bench)
    assert bench.result().failure.kind is FailureKind.PREEMPTED


def test_a_commit_that_takes_longer_than_the_grace_is_pointed_out() -> None:
    bench = Bench(Config(restart={"grace_s": 10}))  # type: ignore[arg-type]
    bench.train()
    bench.checkpoints.handle(Committed(tier="remote", step=4, duration_s=25.0))
    bench.stop.ask("SIGTERM")
    bench.turn()
    assert "the last commit took 25 s" in bench.display.texts[-1] and "step 4 is safe" in bench.display.texts[-1]


def test_a_signal_to_a_rank_is_a_stop_request() -> None:
    bench = Bench()
    bench.train()
    bench.attempt.on_rank(StopSignal(event="stop_signal", in_attempt=1, rank=1))
    bench.turn()
    assert bench.stop.reason == "a signal to rank 1"


def test_the_signals_with_which_torchrun_ends_the_others_are_none() -> None:
    bench = Bench()
    bench.train()
    bench.ranks.end(0)
    bench.attempt.on_rank(StopSignal(event="stop_signal", in_attempt=1, rank=1))
    bench.turn()
    assert not bench.stop


@pytest.mark.parametrize(("others_busy", "hangs"), [(False, True), (True, False)])
def test_silent_ranks_hang_unless_another_node_is_busy(tmp_path: Path, others_busy: bool, hangs: bool) -> None:
    bench = Bench(Config(restart={"hang_timeout_s": 20}), logs=tmp_path)  # type: ignore[arg-type]
    bench.train()
    bench.ranks.pids = {0: 2**22, 1: 2**22}  # of no process, for py-spy
    for _ in range(40):
        if bench.attempt.ending:
            break
        bench.turn(1.0, others_busy=others_busy)
    assert bench.attempt.ending is hangs
    assert [event.name for event in bench.events] == (["hang"] if hangs else [])


@pytest.mark.parametrize(("pid", "kind"), [(1, FailureKind.AGENT_LOST), (2, FailureKind.LAUNCHER_LOST)])
def test_a_helper_that_was_stopped_is_killed_and_no_rank_is_blamed(pid: int, kind: FailureKind) -> None:
    bench = Bench()
    bench.train()
    bench.host.states[pid] = "T"
    bench.turns(8)
    assert not (bench.agent if pid == 1 else bench.launcher).alive
    failure = bench.result().failure
    assert failure.kind is kind and f"SIGSTOP to pid {pid}" in failure.cause


def test_a_dead_agent_ends_the_attempt() -> None:
    bench = Bench()
    bench.train()
    bench.agent.alive = False
    bench.turns(10)
    assert bench.result().failure.kind is FailureKind.AGENT_LOST


def test_a_fenced_node_ends_its_ranks() -> None:
    bench = Bench()
    bench.train()
    bench.checkpoints.handle(FencedEvent(reason="attempt 9 has begun elsewhere"))
    bench.turns(10)
    failure = bench.result().failure
    assert (failure.kind, failure.cause) == (FailureKind.FENCED, "attempt 9 has begun elsewhere")


def test_memory_that_damages_two_snapshots_is_a_bad_node() -> None:
    bench = Bench()
    bench.train()
    bench.checkpoints.handle(SnapshotDamaged(step=10, reason="optimizer.pt has changed in memory"))
    bench.checkpoints.handle(SnapshotDropped(step=12, reason="a rank ended in mid-copy"))
    bench.turns(10)
    assert not bench.attempt.ending
    bench.checkpoints.handle(SnapshotDamaged(step=20, reason="model.safetensors has changed in memory"))
    bench.turns(10)
    failure = bench.result().failure
    assert failure.kind is FailureKind.BAD_NODE and "model.safetensors has changed" in failure.cause


def test_a_launcher_that_stays_after_its_ranks_is_killed() -> None:
    bench = Bench()
    bench.train()
    bench.ranks.done |= {0, 1}
    bench.ranks.kill()
    bench.turns(59)
    assert bench.launcher.alive
    bench.turns(3)
    assert not bench.launcher.alive and bench.result().failure.kind is FailureKind.FINISHED


def test_a_launcher_that_starts_no_rank_is_killed_after_the_quiet_timeout() -> None:
    bench = Bench(Config(restart={"quiet_timeout_s": 50}))  # type: ignore[arg-type]
    bench.turns(49)
    assert bench.launcher.alive
    bench.turns(3)
    failure = bench.result().failure
    assert failure.kind is FailureKind.LAUNCHER_LOST and "no rank was started within 50 s" in failure.cause


def test_the_time_for_which_this_process_was_stopped_counts_against_nobody() -> None:
    bench = Bench(Config(restart={"quiet_timeout_s": 50}))  # type: ignore[arg-type]
    bench.turns(40)
    bench.turn(500.0)
    bench.turns(5)
    assert bench.launcher.alive


def test_a_rank_that_the_kernel_holds_makes_a_bad_node() -> None:
    bench = Bench()
    bench.train()
    bench.ranks.held.add(1)
    bench.ranks.errors[0] = ("ValueError: bad sample", None, False)
    bench.ranks.end(0)
    bench.turns(40, lambda: setattr(bench.attempt, "_quiet_since", bench.host.now))
    failure = bench.result().failure
    assert failure.kind is FailureKind.BAD_NODE and "rank 1 does not end after SIGKILL" in failure.cause


def test_too_many_refused_saves_end_training_in_good_order() -> None:
    bench = Bench(Config(checkpoint={"max_failed_saves": 2}))  # type: ignore[arg-type]
    bench.train()
    for step in (1, 2):
        bench.checkpoints.handle(CommitFailedEvent(tier="remote", step=step, error="no space"))
    bench.turn()
    assert "request_stop" in bench.agent.requests and not bench.ranks.signals
    bench.ranks.preempted |= {0, 1}
    bench.ranks.kill()
    bench.attempt.on_launcher({"finished": False, "failures": []})
    failure = bench.result().failure
    assert failure.kind is FailureKind.STORAGE_FAILED and "2 saves in a row failed" in failure.cause


def test_an_own_failure_counts_for_more_than_being_ended_with_the_others() -> None:
    bench = Bench()
    bench.train()
    bench.ranks.errors[0] = ("ValueError: bad sample", None, False)
    bench.ranks.end(0)
    bench.attempt.end(Failure(FailureKind.ENDED, "ended with another node's ranks"))
    bench.attempt.on_launcher({"finished": False, "failures": []})
    assert "bad sample" in bench.result().failure.cause


@pytest.mark.parametrize("trains", [True, False])
def test_a_pause_is_a_stop_at_an_agreed_step_without_a_stop_request(trains: bool) -> None:
    bench = Bench()
    bench.train()
    if not trains:
        bench.agent.beats = [beat(Phase.RESTORING)] * 2
    assert bench.attempt.graceful.is_training is trains
    bench.turn()
    assert bench.agent.requests.count("request_stop") == 0
    bench.attempt.graceful.paused = True
    bench.turn()
    bench.turn()
    assert bench.agent.requests.count("request_stop") == 1 and not bench.stop
    # Before the first step there is nothing to save.
    assert bench.attempt.ending is not trains


class Relay:
    """Shows nothing."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        self.followed: list[Path] = []
        self.finished = False

    def follow(self, folder: Path) -> None:
        self.followed.append(folder)

    def finish(self) -> None:
        self.finished = True


def test_a_rank_that_starts_is_watched_and_its_output_followed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.node.attempt.OutputRelay", Relay)
    monkeypatch.setattr(FakeDisplay, "pass_on", None, raising=False)
    bench = Bench(job=Job(show_output=True))
    bench.start(0)
    bench.start(1, pid=FakeRanks.DEAD_PID)
    relay: Any = bench.attempt._relay
    assert bench.events == [RankStarted(rank=0, pid=10), RankStarted(rank=1, pid=FakeRanks.DEAD_PID)]
    assert relay.followed == [Path("/l/0")] * 2
    assert list(bench.loop.registered) == [10], "a rank that has died already has no descriptor"
    assert not relay.finished
    bench.ranks.held |= {0, 1}
    bench.attempt.close()
    assert relay.finished and not bench.loop.registered and not bench.ranks.pidfds


def test_what_ranks_report() -> None:
    bench = Bench()
    for message in (
        Done(event="rank_done", in_attempt=1, rank=0),
        PreemptedRank(event="rank_preempted", in_attempt=1, rank=1),
        Failed(event="rank_failed", in_attempt=1, rank=2, error="E: x", frame="f:1", transient=True),
        StopSignal(event="stop_signal", in_attempt=1, rank=3),
        BestModelWritten(event="best_model", in_attempt=1, step=40),
    ):
        bench.attempt.on_rank(message)
    ranks = bench.ranks
    assert (ranks.done, ranks.preempted, ranks.errors) == ({0}, {1}, {2: ("E: x", "f:1", True)})
    assert bench.attempt.graceful.signalled == {3} and bench.events == [BestModel(step=40)]


def test_what_a_rank_sent_before_its_death_is_read_first() -> None:
    bench = Bench()
    bench.start(0)
    bench.unread.append(Done(event="rank_done", in_attempt=1, rank=0))
    bench.loop.registered[10](10)
    assert bench.ranks.deaths == [0] and bench.ranks.failures == [] and not bench.loop.registered


def test_a_rank_that_ran_out_of_memory_in_an_evaluation_says_so_by_its_phase() -> None:
    bench = Bench()
    bench.train(step=15)
    bench.agent.beats[1] = beat(Phase.IDLE, 15)
    bench.ranks.errors[1] = ("OutOfMemoryError: CUDA out of memory.", "model.py:7", False)
    bench.ranks.end(1)
    bench.turn()
    bench.attempt.on_launcher({"finished": False, "failures": []})
    assert bench.result().failure.kind is FailureKind.MEMORY_OUTSIDE_STEPS
