"""What the supervisor does after every kind of end, without a process."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeLeader, FakeNode, FakeSession, ended

from checkpointing.storage import LocalStorage
from runner.config.schema import RestartConfig
from runner.errors import ExitCode, GpuFaulty, LaunchDelayed, LaunchError, UsageError
from runner.journal.attempts import AttemptResult, Job
from runner.journal.events import AttemptEnded, Backoff, RunEnded, StepsSkipped
from runner.lease.lease import Lease, LeaseRecord, newest_lease, take
from runner.node import health_check
from runner.peers.messages import Finish
from runner.program.program import Program
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, Restart, Stop
from runner.recovery.restart_state import RestartState
from runner.session.bad_machines import read_bad_machines
from runner.session.identity import JobIdentity, key_of
from runner.supervisor.supervisor import Supervisor, make_node, retry

FINISHED = ended(FailureKind.FINISHED, 20, cause="all ranks finished")


class Bench:
    """A supervisor whose node does what a test has planned."""

    def __init__(
        self,
        folder: Path,
        *plan: AttemptResult | Callable[[FakeNode], AttemptResult],
        script: str | None = None,
        identity: JobIdentity | None = None,
        **launch: Any,
    ) -> None:
        self.session = FakeSession(folder, **launch)
        (folder / "checkpoints").mkdir(exist_ok=True)
        self.config = self.session.config
        self.node: FakeNode
        self.plan = list(plan)
        self.start_errors: list[Exception | None] = []
        self.drained = True
        self.committed_step = -1
        self.supervisor = Supervisor(
            self.session,
            Job(Program("script", script) if script is not None else None),
            build_node=self._build_node,
            identity=identity,
            location_id="here",
        )

    def _build_node(self, *_: object, **options: Any) -> Any:
        self.node = FakeNode(display=options["display"], record=options["record"])
        self.node.plan, self.node.start_errors, self.node.drained = self.plan, self.start_errors, self.drained
        return self.node

    def run(self) -> ExitCode:
        exit_code = self.supervisor.run()
        assert self.node.closed and not self.node.plan
        (end,) = [event for event in self.session.events if isinstance(event, RunEnded)]
        assert end.exit_code == exit_code and end.reason == self.supervisor.reason
        return exit_code

    @property
    def texts(self) -> str:
        display: Any = self.session.display
        return "\n".join(display.texts)

    @property
    def kept(self) -> RestartState:
        """The state that was kept last."""
        return RestartState.from_json(self.node.notes[-1])


def test_a_run_that_finishes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FINISHED)
    assert bench.run() is ExitCode.DONE
    assert bench.session.names() == ["run_started", "attempt_ended", "run_ended"]
    assert bench.kept.history == [] and bench.kept.running is None


def test_a_request_for_a_checkpoint_is_passed_on_by_the_leader(tmp_path: Path) -> None:
    def train(node: FakeNode) -> AttemptResult:
        bench.session.requests._saves.append("runner save")
        node.each_turn()
        node.each_turn()
        return FINISHED

    bench = Bench(tmp_path, train)
    assert bench.run() is ExitCode.DONE and bench.node.num_saves_asked == 1
    assert bench.session.names().count("save_requested") == 1
    # The leader looks for files; a test of the session has them taken.
    assert bench.session.directory.requests.is_dir()


def test_a_crash_is_followed_by_the_next_attempt_and_the_second_one_by_a_wait(tmp_path: Path) -> None:
    crash = ended(FailureKind.CRASHED, 10)
    bench = Bench(tmp_path, crash, crash, FINISHED)
    bench.config.restart.backoff_jitter_s = 0.0
    assert bench.run() is ExitCode.DONE
    assert [spec.attempt for spec in bench.node.specs] == [1, 2, 3]
    assert bench.session.waits == [0.0, bench.config.restart.backoff_initial_s]
    assert [event.delay_s for event in bench.session.events if isinstance(event, Backoff)] == bench.session.waits
    assert "step 10: why; restarting" in bench.texts


@pytest.mark.parametrize(
    ("step", "after"), [(2, "continues from the last checkpoint"), (None, "starts from the beginning")]
)
def test_the_end_says_what_was_committed_after_the_ranks_had_gone(step: int | None, after: str, tmp_path: Path) -> None:
    def stopped(node: FakeNode) -> AttemptResult:
        if step is not None:
            node.commits_at_end = step
        return ended(FailureKind.ENDED, 21)

    bench = Bench(tmp_path, stopped)
    assert bench.run() is ExitCode.PREEMPTED
    assert bench.supervisor.reason == f"stopped on request; the same command {after}"


def test_the_budget_is_spent_without_a_new_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *[ended(FailureKind.CRASHED, step) for step in (10, 11, 12)])
    bench.config.restart.max_restarts = 2
    assert bench.run() is ExitCode.NO_PROGRESS
    assert [record.failure.step for record in bench.kept.history] == [10, 11, 12]


def test_a_new_checkpoint_refills_the_budget(tmp_path: Path) -> None:
    def commits(step: int) -> Callable[[FakeNode], AttemptResult]:
        def attempt(node: FakeNode) -> AttemptResult:
            node.commit(step)
            return ended(FailureKind.CRASHED, step + 1)

        return attempt

    bench = Bench(tmp_path, *[commits(step) for step in (10, 20, 30, 40)], FINISHED)
    bench.config.restart.max_restarts = 1
    assert bench.run() is ExitCode.DONE


def test_running_out_of_memory_halves_the_micro_batch_for_the_next_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ended(FailureKind.OUT_OF_MEMORY), ended(FailureKind.CRASHED), FINISHED)
    assert bench.run() is ExitCode.DONE
    assert [spec.divisor for spec in bench.node.specs] == [1, 2, 2]


def test_a_script_that_does_not_divide_its_batches_is_not_halved(tmp_path: Path) -> None:
    oom = AttemptResult(Failure(FailureKind.OUT_OF_MEMORY, "out of memory", step=3), used_manager=False)
    bench = Bench(tmp_path, oom, FINISHED, script="train.py")
    assert bench.run() is ExitCode.DONE
    assert [spec.divisor for spec in bench.node.specs] == [1, 1]


def test_steps_that_did_harm_twice_are_skipped(tmp_path: Path) -> None:
    bad = ended(FailureKind.NON_FINITE, 9, signature="NonFinite|10", window=(8, 10))
    bench = Bench(tmp_path, bad, bad, FINISHED)
    assert bench.run() is ExitCode.DONE
    assert [spec.skipped for spec in bench.node.specs] == ["", "", "8-10"]
    assert StepsSkipped(first=8, last=10) in bench.session.events


def test_the_same_error_twice_ends_the_run_and_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    failure = Failure(FailureKind.CRASHED, "ValueError", 0, 9, "ValueError|train.py:3|9")
    bench = Bench(tmp_path, *[AttemptResult(failure, log=log, used_manager=True)] * 2)
    assert bench.run() is ExitCode.DETERMINISTIC
    assert bench.supervisor.failed_log == log
    assert f"(log: {log})" in bench.texts


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (FailureKind.PREEMPTED, ExitCode.PREEMPTED),
        (FailureKind.ENDED, ExitCode.PREEMPTED),
        (FailureKind.BOOT, ExitCode.DETERMINISTIC),
        (FailureKind.FENCED, ExitCode.DETERMINISTIC),
        (FailureKind.STORAGE_FAILED, ExitCode.STORAGE_FAILED),
        (FailureKind.NO_VALID_CHECKPOINT, ExitCode.NO_VALID_CHECKPOINT),
        (FailureKind.BAD_NODE, ExitCode.BAD_NODE),
    ],
)
def test_an_end_that_no_restart_helps_against(kind: FailureKind, exit_code: ExitCode, tmp_path: Path) -> None:
    assert Bench(tmp_path, ended(kind)).run() is exit_code


def test_a_stop_request_before_the_first_attempt_starts_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.session.stop.ask("SIGTERM")
    assert bench.run() is ExitCode.PREEMPTED
    assert bench.session.names() == ["run_started", "stop_requested", "run_ended"]


def test_a_stop_request_ends_the_waiting_for_the_next_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ended(FailureKind.CRASHED))
    wait = bench.session.sleep

    def stopped(seconds: float) -> None:
        bench.session.stop.ask("SIGTERM")
        wait(seconds)

    bench.session.sleep = stopped  # type: ignore[method-assign]
    assert bench.run() is ExitCode.PREEMPTED


def test_a_helper_that_is_killed_while_it_starts_costs_an_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FINISHED)
    bench.start_errors = [LaunchDelayed("the launcher was killed by signal 9")]
    assert bench.run() is ExitCode.DONE
    assert len(bench.session.waits) == 1


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (LaunchError("the launcher ended with status 1"), ExitCode.DETERMINISTIC),
        (UsageError("launch.peer_port: port 1"), ExitCode.USAGE),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), ExitCode.BUDGET_SPENT),
    ],
)
def test_what_cannot_be_started_ends_the_run(error: Exception, exit_code: ExitCode, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start_errors = [error]
    assert bench.run() is exit_code
    assert str(getattr(error, "strerror", None) or error) in bench.supervisor.reason


def test_a_runner_that_was_killed_with_its_attempt_has_cost_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FINISHED)
    bench.config.tiers.durable.sidecars.write_restart_state(RestartState(running=4).to_json(4).encode())
    assert bench.run() is ExitCode.DONE
    assert "the previous runner exited without reporting" in bench.texts


def test_runners_that_are_killed_again_and_again_end_the_run(tmp_path: Path) -> None:
    """A pod that is killed whole must not come back for ever."""
    bench = Bench(tmp_path)
    bench.config.restart.max_restarts = 1
    lost = AttemptRecord(Failure(FailureKind.RUNNER_LOST, "ended together with its runner"), -1)
    bench.config.tiers.durable.sidecars.write_restart_state(RestartState([lost], running=4).to_json(4).encode())
    assert bench.run() is ExitCode.NO_PROGRESS
    assert bench.node.specs == []


def test_a_location_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    def unmounted(node: FakeNode) -> AttemptResult:
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        return ended(FailureKind.CRASHED)

    bench = Bench(tmp_path, unmounted)
    assert bench.run() is ExitCode.STORAGE_FAILED
    assert "is gone; put it back" in bench.supervisor.reason


def test_training_to_the_end_counts_only_with_its_last_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FINISHED)
    bench.drained = False
    assert bench.run() is ExitCode.STORAGE_FAILED
    assert "the last checkpoint was not written" in bench.supervisor.reason


def test_a_stop_request_during_the_last_save_is_no_failure_of_the_storage(tmp_path: Path) -> None:
    def finish(_: FakeNode) -> AttemptResult:
        bench.session.stop.ask("SIGTERM")
        return FINISHED

    bench = Bench(tmp_path, finish)
    bench.drained = False
    assert bench.run() is ExitCode.PREEMPTED
    assert "while the last checkpoint was being written" in bench.supervisor.reason


def test_the_state_is_written_by_the_supervisor_where_there_is_no_agent(tmp_path: Path) -> None:
    def agent_dies(node: FakeNode) -> AttemptResult:
        node.has_agent = False
        return ended(FailureKind.STORAGE_FAILED)

    bench = Bench(tmp_path, agent_dies)
    bench.run()
    kept = RestartState.from_json(bench.config.tiers.durable.sidecars.read_restart_state())
    assert [record.failure.kind for record in kept.history] == [FailureKind.STORAGE_FAILED]


def test_a_fenced_runner_leaves_the_state_to_its_successor(tmp_path: Path) -> None:
    def fenced(node: FakeNode) -> AttemptResult:
        node.checkpoints.fenced, node.has_agent = "attempt 9 has begun elsewhere", False
        node.notes.clear()
        return ended(FailureKind.FENCED)

    bench = Bench(tmp_path, fenced)
    assert bench.run() is ExitCode.DETERMINISTIC
    assert bench.node.notes == [] and bench.config.tiers.durable.sidecars.read_restart_state() is None


def test_a_script_that_divides_its_batches_is_halved(tmp_path: Path) -> None:
    oom = ended(FailureKind.OUT_OF_MEMORY)
    bench = Bench(tmp_path, oom, FINISHED, script="train.py")
    assert bench.run() is ExitCode.DONE
    assert [spec.divisor for spec in bench.node.specs] == [1, 2]


def test_while_an_attempt_runs_the_state_says_so(tmp_path: Path) -> None:
    """A runner that is killed now has cost an attempt, and has not finished its job."""
    seen: list[RestartState] = []

    def attempt(node: FakeNode) -> AttemptResult:
        seen.append(RestartState.from_json(node.notes[-1]))
        return ended(FailureKind.CRASHED)

    bench = Bench(tmp_path, attempt, FINISHED)
    bench.config.tiers.durable.sidecars.write_restart_state(
        RestartState(finished="of a shorter training").to_json(0).encode()
    )
    assert bench.run() is ExitCode.DONE
    assert [(state.running, state.finished) for state in seen] == [(1, "")]
    assert bench.kept.history == [] and bench.kept.running is None, "a run that has finished has no failures"


@pytest.mark.parametrize(("num_nodes", "is_recorded"), [(1, False), (2, True)])
def test_that_a_job_of_several_nodes_has_finished_is_recorded(
    num_nodes: int, is_recorded: bool, tmp_path: Path
) -> None:
    """A node that is restarted after that does not wait for the others."""
    launch: dict[str, Any] = {"nnodes": num_nodes, "master_port": 29400, "master_addr": "127.0.0.1"}
    bench = Bench(tmp_path, FINISHED, identity=OURS, **launch)
    leader = FakeLeader()
    members: Any = bench.supervisor._members

    def open_leader(*_: object, **__: object) -> Any:
        leader.present.add(1)
        members._ready.add(1)
        members._ended[1] = Failure(FailureKind.FINISHED, "all ranks finished", step=20)
        return leader

    members._open_leader = open_leader
    members.begin = lambda spec: None

    def build_node(*_: object, **options: Any) -> Any:
        node = bench._build_node(**options)
        node.shape = (num_nodes, 1)
        return node

    bench.supervisor._build_node = build_node
    assert bench.run() is ExitCode.DONE
    note = bench.config.tiers.durable.sidecars.read_restart_state()
    assert (RestartState.from_json(note).finished == key_of(OURS)) is is_recorded


def test_a_script_that_saves_nothing_is_pointed_out_once(tmp_path: Path) -> None:
    crash = AttemptResult(Failure(FailureKind.CRASHED, "killed", 1, step=0))
    bench = Bench(tmp_path, crash, crash, FINISHED, script="train.py")
    assert bench.run() is ExitCode.DONE
    assert bench.texts.count("used neither resilient() nor a CheckpointManager") == 1


def test_lost_steps_are_counted_over_attempts(tmp_path: Path) -> None:
    second = AttemptResult(Failure(FailureKind.FINISHED, "done", step=20), start_step=7, training_began=1.0)
    bench = Bench(tmp_path, ended(FailureKind.CRASHED, 10), second)
    bench.run()
    assert (bench.kept.lost_steps, bench.kept.reached) == (3, 20)


def test_every_attempt_is_recorded_with_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ended(FailureKind.HUNG), FINISHED)
    bench.run()
    kinds = [event.kind for event in bench.session.events if isinstance(event, AttemptEnded)]
    assert kinds == ["hung", "finished"]


OURS = JobIdentity({"job": "the configured job", "data.path": "a.parquet"})
LONGER = JobIdentity({**OURS.what, "trainer.max_steps": 200})


@pytest.mark.parametrize(("finished", "exit_code"), [(OURS, ExitCode.DONE), (LONGER, ExitCode.BUDGET_SPENT)])
def test_a_finished_run_waits_for_nobody_for_long(finished: JobIdentity, exit_code: ExitCode, tmp_path: Path) -> None:
    """Unless it is to go further: then the other nodes are needed."""
    bench = Bench(tmp_path, identity=OURS, nnodes=2, master_port=29400, master_addr="127.0.0.1")
    storage = LocalStorage(tmp_path / "checkpoints")
    storage.sidecars.write_restart_state(RestartState(finished=key_of(finished)).to_json(3).encode())
    began = bench.session.host.now
    leader: Any = bench.supervisor._members

    leader._open_leader = lambda *_, **__: FakeLeader()

    def build_node(*_: object, **options: Any) -> Any:
        node = bench._build_node(**options)
        node.shape = (2, 1)
        return node

    bench.supervisor._build_node = build_node
    assert bench.run() is exit_code
    waited_s = bench.session.host.now - began
    assert waited_s < 40 if finished is OURS else waited_s >= bench.config.launch.rendezvous_timeout_s


def test_the_key_of_a_job_is_that_of_equal_jobs_alone() -> None:
    again = JobIdentity(dict(reversed(list(OURS.what.items()))))
    assert key_of(OURS) == key_of(again) != key_of(LONGER)


# -- the lease -------------------------------------------------------------------------------------------------------

LEASE = LeaseRecord(2, "b", "b1", 1, "10.0.0.2", "the-run")
NEWER = LeaseRecord(3, "c", "c1", 2, "10.0.0.3", "the-run")


def leading(
    tmp_path: Path, *plan: AttemptResult | Callable[[FakeNode], AttemptResult], leader: FakeLeader | None = None
) -> tuple[Bench, Lease]:
    """A node that leads in place of the first one."""
    bench = Bench(tmp_path, *plan, nnodes=3, min_nodes=1, node_rank=1, master_addr="10.0.0.1", last_call_s=0.0)
    sidecars = LocalStorage(tmp_path / "checkpoints").sidecars
    take(sidecars, LEASE)
    keeper = Lease(sidecars, LEASE)

    def build_node(*arguments: Any, **options: Any) -> Any:
        node = bench._build_node(*arguments, **options)
        node.shape = (3, 1)
        return node

    def open_leader(*_: Any, **__: Any) -> Any:
        return leader or FakeLeader()

    bench.supervisor = Supervisor(
        bench.session, Job(), build_node=build_node, location_id="here", lease=keeper, open_leader=open_leader
    )
    return bench, keeper


def test_a_node_that_leads_in_place_of_the_first_one_has_the_others_meet_there(tmp_path: Path) -> None:
    bench, keeper = leading(tmp_path, FINISHED)
    assert bench.run() is ExitCode.DONE
    (spec,) = bench.node.specs
    assert (spec.nnodes, spec.leader, spec.leader_host) == (1, 1, "10.0.0.2")
    assert bench.node.leads and newest_lease(keeper._sidecars) == replace(LEASE, released=True)


def test_a_leader_that_was_replaced_ends_its_attempt_and_is_to_be_started_again(tmp_path: Path) -> None:
    def attempt(node: FakeNode) -> AttemptResult:
        keeper.replaced_by = NEWER
        node.each_turn()
        return ended(FailureKind.ENDED, 7)

    bench, keeper = leading(tmp_path, attempt)
    assert bench.run() is ExitCode.PREEMPTED
    assert "node 2 leads this run now (lease 3)" in bench.supervisor.reason
    assert [verdict.kind for verdict in bench.node.verdicts] == [FailureKind.ENDED]
    # The restart state is the new leader's.
    assert len(bench.node.notes) == 1


def test_a_leader_that_is_fenced_looks_who_leads(tmp_path: Path) -> None:
    def attempt(node: FakeNode) -> AttemptResult:
        take(keeper._sidecars, NEWER)
        return ended(FailureKind.FENCED, 7)

    bench, keeper = leading(tmp_path, attempt)
    assert bench.run() is ExitCode.PREEMPTED
    assert newest_lease(keeper._sidecars) == NEWER


def test_a_leader_that_a_slow_one_has_fenced_takes_the_next_number(tmp_path: Path) -> None:
    """The slow one had begun the same attempt a moment before it found out that it does not lead any more."""

    def fenced(node: FakeNode) -> AttemptResult:
        node.checkpoints.fenced = "attempt 1 of this run has begun"
        return ended(FailureKind.FENCED, 7)

    bench, _ = leading(tmp_path, fenced, FINISHED)
    assert bench.run() is ExitCode.DONE
    assert [spec.attempt for spec in bench.node.specs] == [1, 2]
    kinds = [event.kind for event in bench.session.events if isinstance(event, AttemptEnded)]
    assert kinds == ["outpaced", "finished"]


def test_a_leader_that_is_fenced_by_another_run_gives_up(tmp_path: Path) -> None:
    bench, _ = leading(tmp_path, *[ended(FailureKind.FENCED, 7)] * 6)
    assert bench.run() is ExitCode.DETERMINISTIC


def test_a_leader_that_was_replaced_leaves_the_others_to_the_new_one(tmp_path: Path) -> None:
    """They would exit with its code; when the connection closes they look who leads."""

    def attempt(node: FakeNode) -> AttemptResult:
        leader.present.add(2)
        keeper.replaced_by = NEWER
        return ended(FailureKind.ENDED, 7)

    leader = FakeLeader()
    bench, keeper = leading(tmp_path, attempt, leader=leader)
    assert bench.run() is ExitCode.PREEMPTED
    assert leader.closed and not [message for _, message in leader.sent if isinstance(message, Finish)]


def test_a_leader_that_waits_for_nodes_notices_that_it_was_replaced(tmp_path: Path) -> None:
    bench, keeper = leading(tmp_path)
    bench.config.launch.min_nodes = 2
    loop: Any = bench.session.loop
    loop.plan = [lambda: None, lambda: setattr(keeper, "replaced_by", NEWER)]
    assert bench.run() is ExitCode.PREEMPTED


STOP = Stop(ExitCode.DONE, "why")
CONFIG = RestartConfig(backoff_initial_s=10.0, backoff_max_s=25.0, backoff_jitter_s=0.0)


def repeated(folder: Path, decisions: list[Restart | Stop]) -> FakeSession:
    session = FakeSession(folder)
    assert retry(lambda: decisions.pop(0), CONFIG, session) is STOP and not decisions
    return session


def test_a_stop_is_the_end(tmp_path: Path) -> None:
    session = repeated(tmp_path, [STOP])
    assert not session.waits and not session.events


def test_waits_double_with_the_failures_in_a_row_and_are_recorded(tmp_path: Path) -> None:
    session = repeated(tmp_path, [*(Restart(number, "why") for number in (1, 2, 3, 4, 1)), STOP])
    assert session.waits == [0.0, 10.0, 20.0, 25.0, 0.0]
    assert session.events == [Backoff(delay_s=delay) for delay in session.waits]


def test_the_loop_has_no_limit_of_its_own(tmp_path: Path) -> None:
    session = repeated(tmp_path, [*[Restart(1, "why")] * 500, STOP])
    assert len(session.waits) == 500


def test_an_error_of_an_attempt_is_not_retried(tmp_path: Path) -> None:
    def fail() -> Stop:
        raise OSError("why")

    with pytest.raises(OSError, match="why"):
        retry(fail, CONFIG, FakeSession(tmp_path))


def test_a_node_shares_what_its_session_has(tmp_path: Path) -> None:
    session = FakeSession(tmp_path)
    made: list[Any] = []

    def build(*arguments: Any, **options: Any) -> Any:
        made.append((arguments, options))

    make_node(session, Job(Program("script", "train.py")), "leaders-run", build=build)
    make_node(session, Job(Program("script", "train.py")), "leaders-run", record=made.append, build=build)
    (arguments, options), (_, others) = made
    assert arguments == (session.config, session.directory, Job(Program("script", "train.py")), "leaders-run")
    assert options["loop"] is session.loop and options["record"] == session.record and others["record"] == made.append


def test_the_gpus_of_a_node_of_several_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def build(*arguments: Any, **options: Any) -> Any:
        made.append(options)

    monkeypatch.setattr(
        health_check,
        "start_check",
        lambda output, errors: subprocess.Popen([sys.executable, "-c", "1/0"], stdout=output, stderr=errors),
    )
    several = {"nnodes": 2, "master_addr": "node0"}
    cases: list[dict[str, Any]] = [several, {}, {**several, "check_gpus": False}]
    sessions = [FakeSession(tmp_path / str(number), **launch) for number, launch in enumerate(cases)]
    for session in sessions:
        make_node(session, Job(), "run", build=build)
    assert ["check_gpus" in options for options in made] == [True, False, False]
    with pytest.raises(GpuFaulty, match="ZeroDivisionError"):
        made[0]["check_gpus"]()
    bad = read_bad_machines(sessions[0].config.tiers.durable.sidecars, sessions[0].clock())
    assert ["ZeroDivisionError" in one.cause for one in bad] == [True]
