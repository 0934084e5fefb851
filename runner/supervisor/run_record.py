"""What the leader keeps with the checkpoints: the restart state, and a copy of the journal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Set as AbstractSet

from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError
from checkpointing.host.limits import explained
from checkpointing.host.watched_directory import WatchedDirectory
from checkpointing.storage import Storage
from runner.config.schema import Config
from runner.errors import ExitCode, RunnerError, with_path
from runner.journal.attempts import AttemptSpec, Job
from runner.journal.events import RunEnded, RunStarted, StepsSkipped
from runner.journal.journal import read_journal
from runner.journal.ledger import NOT_RUNNING
from runner.journal.mirror import JournalCopy, needs_copy
from runner.journal.run_directory import RunDirectory
from runner.journal.summary import RunState, summarise
from runner.node.node import Node
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, Restart, Stop
from runner.recovery.restart_state import RestartState, RunnerProcess, process_namespace
from runner.session.admission import Limits
from runner.session.identity import JobIdentity, key_of
from runner.session.session import Session

_END_STATES = {ExitCode.DONE: RunState.FINISHED, ExitCode.PREEMPTED: RunState.PREEMPTED}


class RunRecord:
    """Reads the restart state when the run starts, and keeps it and the journal with the checkpoints.

    While the durable tier `is_away`, the local one has a copy of the state.

    Attributes:
        state: The restart state; its owner changes it and calls `keep`.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        run_id: str,
        identity: JobIdentity | None,
        *,
        is_away: bool = False,
    ) -> None:
        self._tiers, self._identity = config.tiers, identity
        kept = (self._tiers.first if is_away else self._tiers.durable).sidecars
        self.state = RestartState.from_json(kept.read_restart_state())
        self.state.lineage = self.state.lineage or run_id
        self.state.runner = RunnerProcess.current()
        self._copy = JournalCopy(directory.journal, self.state.lineage, run_id) if needs_copy(config) else None

    def started(self, session: Session, committed_step: int, location_id: str | None) -> RunStarted:
        """Return the event that begins a session; the location has no id if it could not be asked."""
        config, runner = session.config, self.state.runner
        return RunStarted(
            run_id=session.run_id,
            pid=os.getpid(),
            runner=dataclasses.asdict(runner) if runner is not None else None,
            namespace=process_namespace(),
            committed_step=committed_step,
            max_restarts=config.restart.max_restarts,
            cost=config.cost.model_dump(),
            location=config.checkpoint_location,
            place=location_id,
        )

    @property
    def has_finished(self) -> bool:
        """Whether an earlier session recorded that this very job has finished."""
        return self._identity is not None and self.state.finished == key_of(self._identity)

    def add(self, failure: Failure, committed_step: int) -> None:
        """Record how an attempt ended, and the newest committed step, -1 if there is none."""
        self.state.running = None
        if not failure.kind.rule.is_failure:
            if failure.kind is FailureKind.FINISHED:
                self.state.history.clear()
            return
        self.state.add(AttemptRecord(failure, committed_step))

    def take(self, decision: Restart, session: Session) -> None:
        """Take in what the next attempt does in another way."""
        self.state.batch = decision.batch
        if decision.skip is not None:
            first, last = decision.skip
            self.state.skipped.append(decision.skip)
            session.record(StepsSkipped(first=first, last=last))

    def next_spec(
        self, session: Session, nodes: AbstractSet[int], job: Job, limits: Limits, *, held: bool = False, host: str = ""
    ) -> AttemptSpec:
        """Return the specification of the session's newest attempt; see `AttemptSpec` for `held`.

        The nodes meet at `host`, an address of this node; where it is empty, as they are configured.
        """
        run = summarise(read_journal(session.directory.journal), now=session.clock())
        failures = sum(attempt.failed for attempt in run.attempts)
        running_s = run.wall_s - run.time_by_cause[NOT_RUNNING]
        return AttemptSpec(
            session.attempt,
            len(nodes),
            self.state.batch.divisor,
            ",".join(f"{first}-{last}" for first, last in self.state.skipped),
            f"{failures}:{running_s:.0f}",
            self.state.lineage,
            self.state.lost_steps,
            self.state.reached,
            job.resume_from,
            job.allow_changes,
            limits.max_nodes,
            limits.max_nodes * limits.local_ranks if limits.is_elastic else 0,
            held,
            session.config.launch.node_rank,
            host,
            tuple(sorted(nodes)) if limits.max_nodes > 1 else (),
        )

    def keep(self, node: Node | None, attempt: int) -> None:
        """Have the state written, by the agent of the leader's node; where there is none, by this process."""
        # Once another runner has taken the run over, the state is its own.
        if node is not None and node.checkpoints.fenced is not None:
            return
        text = self.state.to_json(attempt)
        if node is None or not node.note(text):
            with contextlib.suppress(OSError):
                self._tiers.durable.sidecars.replace_restart_state(text.encode())
        if self._tiers.local is not None:
            # For a start while the durable tier does not answer.
            with contextlib.suppress(OSError):
                self._tiers.local.sidecars.write_restart_state(text.encode())

    def keep_finished(self, attempt: int) -> None:
        """Record that the job has finished, before any node exits with 0; the agent has ended.

        A runner that is restarted afterwards, on this node or another, does not wait for the others.
        """
        if self._identity is not None:
            self.state.finished = key_of(self._identity)
            self.keep(None, attempt)

    def is_durable(self, step: int) -> bool:
        """Return whether a step is the newest of the durable tier; False if that cannot be found out."""
        try:
            return Tiers(self._tiers.durable).newest_committed()[0] == step
        except (CheckpointError, OSError):
            return False

    # -- the journal's copy ------------------------------------------------------------------------------------------

    def copy_journal(self, node: Node, now: float) -> None:
        """Have new events copied now and then; `now` is monotonic seconds."""
        if self._copy is not None:
            self._copy.turn(now, node.keep_file, node.agent_pid)

    def flush_journal(self, node: Node) -> None:
        """Have all new events copied."""
        if self._copy is not None:
            self._copy.flush(node.keep_file)

    def finish_journal(self) -> None:
        """Copy what the agent, which has ended, did not."""
        if self._copy is not None:
            self._copy.finish(self._tiers.durable)


def finished_job(storage: Storage) -> str | None:
    """Return the key of the job that a restart state says has finished; None if it cannot be read."""
    try:
        return RestartState.from_json(storage.sidecars.read_restart_state()).finished
    except (CheckpointError, OSError):
        return None


def end_state(exit_code: ExitCode) -> RunState:
    """Return the state of a run that has ended with a code."""
    return _END_STATES.get(exit_code, RunState.FAILED)


def ended(decision: Stop) -> RunEnded:
    """Return the event that ends a session."""
    state = end_state(decision.exit_code)
    return RunEnded(state=state.value, exit_code=int(decision.exit_code), reason=decision.reason)


def end_of_error(error: RunnerError | OSError) -> Stop:
    """Return how a runner ends that met an error outside of an attempt."""
    if isinstance(error, RunnerError):
        return Stop(error.exit_code, str(error))
    # Such as a full disk or too many open files: a later start, or another node, may not meet it.
    limit = explained(error.strerror or str(error))
    return Stop(ExitCode.BUDGET_SPENT, f"system error: {with_path(error)}{limit}")


def end_without_location(durable: Storage, attempt: int, watched: WatchedDirectory | None = None) -> Stop | None:
    """Return how a run ends whose location was moved or unmounted; None if it is there, or was removed.

    Another attempt would start from the beginning, in another folder of that name. What was removed nobody can put
    back, and the next attempt keeps what is in memory in a new folder. `watched` is the location as the run knew it.
    """
    root = durable.root
    try:
        if root is None or root.is_dir() or (watched is not None and watched.was_removed):
            return None
    except OSError:
        # It does not answer now; the next attempt waits for that.
        return None
    return Stop(ExitCode.STORAGE_FAILED, f"{root} existed when attempt {attempt} began and is gone; put it back")


def end_without_last_save(tiers: Tiers, *, is_stop: bool) -> Stop:
    """Return how a run ends that trained to its end, or until a stop, and whose last checkpoint was not written."""
    if is_stop:
        return Stop(ExitCode.PREEMPTED, "stopped on request while the last checkpoint was being written")
    reason = "trained to the end, but the last checkpoint was not written"
    if tiers.local is not None:
        reason += f" to {tiers.durable.location}; start the run again on this machine to upload what is in "
        reason += str(tiers.local.location)
    return Stop(ExitCode.STORAGE_FAILED, reason)
