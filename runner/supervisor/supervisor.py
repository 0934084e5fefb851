"""The loop that keeps a run going: it starts an attempt, waits for its end, decides, waits, and starts the next.

It leads: in a run of several nodes it runs on one of them, and the others follow it (`follower.py`). Every wait goes
through the event loop, so that all of them can be interrupted. Whatever happens, no process of the run is left when
`run` returns.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable
from pathlib import Path

from checkpointing.agent.events import Event
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import may_pass
from checkpointing.host.limits import explained
from checkpointing.host.watched_directory import WatchedDirectory
from runner.config.schema import Config, RestartConfig
from runner.errors import ExitCode, LaunchDelayed, LaunchError, PeersMissing, RunnerError, with_path
from runner.journal.attempts import Job
from runner.journal.events import Backoff
from runner.lease.leadership import Inherited, Leadership
from runner.lease.lease import Lease
from runner.node.health_check import HealthCheck
from runner.node.node import Node
from runner.peers.link import Leader
from runner.recovery.failure import Failure
from runner.recovery.kinds import Action, FailureKind
from runner.recovery.policy import BatchDivision, Restart, Stop, backoff_s, decide, end_of_node, stopped_on_request
from runner.session.admission import Limits, StepSamples, counts_samples, samples_per_step
from runner.session.bad_machines import exclude_own_machine
from runner.session.identity import JobIdentity
from runner.session.session import Session
from runner.supervisor.membership import Membership
from runner.supervisor.run_record import RunRecord, end_of_error, end_without_last_save, end_without_location, ended
from runner.system.processes import Host
from runner.ui.progress import ProgressDisplay

_RETRY_S = 1.0
# What only people change.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Supervisor:
    """Runs one job to its end; the other nodes must share its identity.

    Where not only the first node can lead, it leads by a lease. If it has followed another leader until now, it begins
    with what it has inherited.

    Attributes:
        reason: Why the run has ended.
        failed_log: File with the standard error of the rank that ended the run; None if there is none.
        was_replaced: Whether another node leads the run now, which this one may follow.
    """

    def __init__(
        self,
        session: Session,
        job: Job,
        *,
        location_id: str | None = None,
        identity: JobIdentity | None = None,
        lease: Lease | None = None,
        inherited: Inherited | None = None,
        build_node: Callable[..., Node] = Node,
        open_leader: Callable[..., Leader] = Leader,
    ) -> None:
        self._session, self._job, self._location_id, self._identity = session, job, location_id, identity
        self._config, self._directory, self._display = session.config, session.directory, session.display
        self._build_node = build_node
        self._lead, self._inherited = Leadership(session, lease), inherited
        self._members = Membership(
            session,
            identity=identity,
            lead=self._lead,
            expected=inherited.companions if inherited is not None else frozenset(),
            on_event=lambda event: self._node.checkpoints.handle_forwarded(event),
            open_leader=open_leader,
        )
        self._node: Node
        self._record: RunRecord
        self._samples: StepSamples
        # Last finished step of the newest attempt.
        self._last_step = 0
        self._notices = Notices(self._config, self._display)
        self._faltering = Faltering(self._config.launch.rendezvous_timeout_s)
        # Whether some rank of the run has used a checkpoint manager.
        self._used_manager = False
        # The location of a directory, as the newest attempt found it.
        self._location: WatchedDirectory | None = None
        self.reason, self.was_replaced = "", False
        self.failed_log: Path | None = None

    def run(self) -> ExitCode:
        """Supervise until the run has ended, and return the exit code of the process; may be called once."""
        with self._session:
            exit_code = self.lead()
        self._display.close()
        return exit_code

    def lead(self) -> ExitCode:
        """Do what `run` does in a session that has been entered, and stays so."""
        self._begin()
        decision: Stop | None = None
        try:
            decision = self._supervise()
        finally:
            self._keep_state()
            self._record.flush_journal(self._node)
            # After any end but a good one all nodes are restarted, and no commit needs the others.
            if decision is None or decision.exit_code is not ExitCode.DONE:
                # A leader that was replaced leaves the others to the new one.
                self._members.dismiss(None if self._lead.is_lost else decision)
            drained = self._node.close()
        if decision == stopped_on_request(-1):
            # The agent may have committed the first snapshot only now.
            decision = stopped_on_request(self._node.checkpoints.committed_step)
        if decision.exit_code is ExitCode.DONE:
            decision = self._finish(decision, drained=drained)
        decision = end_of_node(decision, self._config.launch.node_rank, self._members.bad_nodes)
        self.reason, self.was_replaced = decision.reason, self._lead.is_lost
        self._session.record(ended(decision))
        self._record.finish_journal()
        self._lead.release()
        return decision.exit_code

    def _begin(self) -> None:
        session, config = self._session, self._config
        # A durable tier that could not be asked for its id is not asked for anything else.
        is_away = self._location_id is None and config.tiers.local is not None
        tiers = Tiers(config.tiers.first) if is_away else config.tiers
        # The journal is this node's; a runner on another node may have continued the run meanwhile.
        session.attempt = max(session.attempt, tiers.catalog.newest_attempt())
        newest, over_all_stages = tiers.newest_committed()
        self._record = RunRecord(config, self._directory, session.run_id, self._identity, is_away=is_away)
        state, counts = self._record.state, self._identity is None or counts_samples(self._identity, self._record.state)
        known = samples_per_step(tiers.catalog) if counts else None
        self._samples = StepSamples(config, known, state.batch, has_script=self._job.program is not None)
        self._display.state.committed_step = newest if newest >= 0 else None
        # Once people read that the run has started, they may ask it for something.
        session.requests.watch(session.loop, begins=self._inherited is None)
        session.record(self._record.started(session, newest, self._location_id))
        self._lead.begin(took_over=self._inherited is not None)
        inherited = self._inherited.node if self._inherited is not None else None
        self._node = inherited or make_node(session, self._job, self._lead.run_id, build=self._build_node)
        self._node.leads, self._node.checkpoints.committed_step = True, over_all_stages

    def _supervise(self) -> Stop:
        """Run attempts until one of them, or something around them, ends the run."""
        try:
            if (lost := self._stop_after_lost_runners()) is not None:
                return lost
            if self._config.tiers.durable.root is None and self._location_id is not None:
                # There is no lock: a second runner must find this one's name as early as possible.
                self._keep_state()
            return retry(self._attempt_and_decide, self._config.restart, self._session)
        except (RunnerError, OSError) as error:
            return end_of_error(error)

    def _finish(self, decision: Stop, *, drained: bool) -> Stop:
        """End a run that has trained to its end; `drained` says that the agent committed everything."""
        # An agent that was lost at the very end may have had nothing left to do but to remove older checkpoints.
        if not drained and not self._record.is_durable(self._last_step):
            decision = end_without_last_save(self._config.tiers, is_stop=bool(self._session.stop))
        elif self._members.has_others and self._node.checkpoints.fenced is None:
            self._record.keep_finished(self._session.attempt)
        self._members.dismiss(decision)
        return decision

    def _stop_after_lost_runners(self) -> Stop | None:
        """Count a failure if the previous runner was killed together with all that it had started."""
        if not self._record.state.account_for_lost_runner(self._node.checkpoints.committed_step):
            return None
        self._display.message("the previous runner exited without reporting; this counts as a failure")
        decision = self._decide()
        return decision if isinstance(decision, Stop) else None

    # -- attempts and decisions --------------------------------------------------------------------------------------

    def _attempt_and_decide(self) -> Restart | Stop:
        stop = self._session.stop
        try:
            self._prepare_attempt()
        except (LaunchDelayed, LaunchError, PeersMissing) as error:
            # What a stop request has interrupted says nothing.
            if not stop:
                return self._decide_without_attempt(error)
        if stop:
            self._session.announce_stop(self._members.announce_stop)
            return Stop(ExitCode.PREEMPTED, "stopped on request before an attempt began")
        return self._record_and_decide(*self._run_attempt())

    def _prepare_attempt(self) -> None:
        """Start what an attempt needs, and wait for the other nodes; what a file system fails in is tried again."""
        stop = self._session.stop
        while not stop:
            try:
                self._node.ensure_processes()
                if not stop:
                    self._gather()
                # The next one's history is read from it.
                with contextlib.suppress(FileNotFoundError), self._directory.journal.open("rb") as journal:
                    journal.read(1)
            except OSError as error:
                self._faltering.wait(error, self._session)
            else:
                self._faltering.over()
                return

    def _decide_without_attempt(self, error: LaunchDelayed | LaunchError | PeersMissing) -> Restart | Stop:
        """Decide after an attempt that could not begin; raises the error where there is nothing to decide."""
        if isinstance(error, LaunchDelayed):
            kind = FailureKind.LIMITED if explained(str(error)) else FailureKind.LAUNCHER_LOST
            return self._record_and_decide(Failure(kind, str(error)), None)
        if isinstance(error, PeersMissing) and self._record.has_finished:
            return Stop(ExitCode.DONE, "had finished before; the other nodes are gone")
        raise error

    def _gather(self) -> None:
        """Wait until all nodes are ready, if their ranks can share the samples of a step."""
        limits = Limits.of(self._config.launch, self._node.shape, self._samples)
        limits.check()
        if self._job.program is None:
            self._notices.show_learning_rate(limits.max_nodes * limits.local_ranks)
        self._members.gather(limits, has_finished=self._record.has_finished, each_turn=self._lead.check)

    def _record_and_decide(self, failure: Failure, log: Path | None) -> Restart | Stop:
        """Record how an attempt ended, and decide what follows."""
        self._lead.check()
        self._last_step = failure.step
        self._record.add(failure, self._node.checkpoints.committed_step)
        decision = self._decide(failure)
        if isinstance(decision, Restart):
            decision = (
                end_without_location(self._config.tiers.durable, self._session.attempt, self._location) or decision
            )
        if isinstance(decision, Restart):
            self._record.take(decision, self._session)
            where = f" (log: {log})" if log is not None else ""
            self._display.message(f"step {failure.step}: {decision.reason}; restarting{where}")
        elif log is not None:
            self.failed_log = log
        self._keep_state()
        return decision

    def _decide(self, failure: Failure | None = None) -> Restart | Stop:
        """Decide after the newest recorded failure, or after an end that is not recorded as one."""
        checkpoints, state = self._node.checkpoints, self._record.state
        history = state.history_with(failure, checkpoints.committed_step)
        batch, divisor = checkpoints.batch, state.batch.divisor
        known = batch or BatchDivision(samples=state.batch.samples, model_ranks=state.batch.model_ranks)
        state.batch = BatchDivision(known.micro_batch, known.accumulation, divisor, known.samples, known.model_ranks)
        return decide(
            history,
            max_restarts=self._config.restart.max_restarts,
            stop_requested=bool(self._session.stop),
            max_network_retries=self._config.restart.max_network_retries,
            batch=state.batch,
            skips_left=self._config.guards.max_skipped_windows - len(state.skipped),
            # A script without this library does not learn of it.
            can_cut=self._job.program is None or self._used_manager,
        )

    def _keep_state(self) -> None:
        if not self._lead.is_lost:
            self._record.keep(self._node, self._session.attempt)

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _run_attempt(self) -> tuple[Failure, Path | None]:
        """Run an attempt on all nodes; returns why it ended, and the log of the rank that failed, if that is here."""
        session, state = self._session, self._record.state
        session.attempt += 1
        state.running, state.finished = session.attempt, ""
        self._keep_state()
        held = self._node.has_state or self._members.hold_state
        spec = self._record.next_spec(
            session, self._members.nodes, self._job, self._members.limits, held=held, host=self._lead.host
        )
        if (root := self._config.tiers.durable.root) is not None:
            watched = WatchedDirectory(root)
            # One that was removed is made again by the agent, later.
            self._location = watched if watched.is_held else self._location
        self._members.begin(spec)
        self._node.others_busy = False
        result = self._node.run_attempt(spec, self._each_turn)
        failure = self._lead.judge(self._members.join(result.failure))
        self._used_manager |= result.used_manager
        if self._job.program is not None and not self._used_manager and not session.stop:
            self._notices.show_unsaved(failure)
        if result.training_began:
            state.account_for_steps(result.start_step, failure.step or result.start_step)
        session.record(result.event(failure, self._node.checkpoints.committed_step))
        return failure, result.log if failure.rank == result.failure.rank else None

    def _each_turn(self) -> None:
        """Handle stop requests and other nodes while an attempt runs."""
        self._record.copy_journal(self._node, self._session.monotonic())
        self._session.announce_stop(self._members.announce_stop, saves=self._node.saves)
        self._session.pass_on_save(self._node.save_now, saves=not self._node.saves_nothing)
        if self._samples.learn(
            self._node.checkpoints.batch, len(self._members.nodes) * self._members.limits.local_ranks
        ):
            self._members.limits = Limits.of(self._config.launch, self._node.shape, self._samples)
        self._members.turn(self._node)
        if self._lead.is_lost:
            self._node.end_attempt(Failure(FailureKind.ENDED, "another node leads this run now"))


def make_node(
    session: Session,
    job: Job,
    run_id: str,
    *,
    record: Callable[[Event], None] | None = None,
    build: Callable[..., Node] = Node,
) -> Node:
    """Return a session's own node of a run; nothing is started.

    Its events go to `record`, by default to the session's journal.
    """
    launch = session.config.launch

    def exclude(fault: str) -> None:
        exclude_own_machine(session.config, fault, session.clock())

    health = HealthCheck(exclude, loop=session.loop, stop=session.stop, host=Host())
    return build(
        session.config,
        session.directory,
        job,
        run_id,
        display=session.display,
        record=record or session.record,
        clock=session.clock,
        loop=session.loop,
        stop=session.stop,
        runtime=session.runtime,
        **({"check_gpus": health.run} if launch.nnodes > 1 and launch.check_gpus else {}),
    )


def retry(attempt: Callable[[], Restart | Stop], restart: RestartConfig, session: Session) -> Stop:
    """Run attempts until one decides to stop, with a backoff before each further one; return the last decision.

    The number of attempts is limited by the decisions (`policy.decide`), not here. A stop request ends the wait.
    """
    while isinstance(decision := attempt(), Restart):
        delay_s = backoff_s(
            decision.failures_in_a_row,
            initial_s=restart.backoff_initial_s,
            max_s=restart.backoff_max_s,
            jitter_s=restart.backoff_jitter_s,
        )
        session.record(Backoff(delay_s=round(delay_s, 3)))
        session.sleep(delay_s)
    return decision


class Faltering:
    """Waits out a file system that fails between attempts: snapshots in memory would end with this process."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._since = patience_s, math.inf

    def over(self) -> None:
        """Note that it works."""
        self._since = math.inf

    def wait(self, error: OSError, session: Session) -> None:
        """Wait a second; raises `error` if it will not pass, does not pass in time, or the run is to stop."""
        now = session.monotonic()
        if session.stop or not may_pass(error) or error.errno in _NO_ROOM or now - self._since > self._patience_s:
            raise error
        if self._since == math.inf:
            self._since = now
            session.display.message(f"{with_path(error)}; trying again for {self._patience_s:.0f} s")
        session.sleep(_RETRY_S)


class Notices:
    """Shows each message at most once per session."""

    def __init__(self, config: Config, display: ProgressDisplay) -> None:
        self._config, self._display = config, display
        self._learning_rate_shown = self._unsaved_shown = False

    def show_learning_rate(self, world_size: int) -> None:
        """Show the learning rate that the ranks of all nodes use: it is not the number in the configuration."""
        rate, groups = self._config.trainer.get("learning_rate"), self._config.sharing(world_size)
        if groups == 1 or not self._config.scale_learning_rate or self._learning_rate_shown or rate is None:
            return
        self._learning_rate_shown = True
        others = "groups of ranks" if self._config.model_ranks > 1 else "virtual ranks"
        self._display.message(
            f"learning rate {rate:g} x {groups} {'ranks' if groups == world_size else others} = "
            f"{rate * groups:g} (scale_learning_rate=false turns this off)"
        )

    def show_unsaved(self, failure: Failure) -> None:
        """Warn after an attempt without a checkpoint manager, unless it may not have come far enough to save."""
        rule = failure.kind.rule
        if not rule.is_failure or rule.action in (Action.GIVE_UP, Action.RETRY) or self._unsaved_shown:
            return
        if failure.rank is None and failure.kind is FailureKind.CRASHED:
            return
        self._unsaved_shown = True
        self._display.message(
            "the script has used neither resilient() nor a CheckpointManager: nothing is saved, and each attempt "
            "starts from the beginning"
        )
