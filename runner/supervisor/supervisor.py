"""The loop that keeps a run going: starts attempts, sees them end, decides, waits, starts the next.

It leads: on a run of several nodes it is the first node's, and the others follow it (`follower.py`).
Every wait goes through the event loop, so that all of them can be interrupted. Whatever happens, no process of the run
is left when `run` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import time
from pathlib import Path
from typing import Any

import tenacity

from checkpointing.errors import CheckpointError, InvalidCheckpoint, StorageUnreachable
from checkpointing.storage import LocalStorage
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.tiers import Tiers
from runner.config.schema import Config
from runner.errors import ExitCode, HelperKilled, LaunchError, PeersMissing, RunnerError, StorageFull, UsageError
from runner.journal.journal import read_journal
from runner.journal.ledger import NO_FAILURE, WAITING
from runner.journal.mirror import JournalCopy, needs_copy
from runner.journal.run_directory import RunDirectory
from runner.journal.states import RunState, StateMachine
from runner.journal.summary import summarise
from runner.node.messages import AttemptResult, AttemptSpec, Job
from runner.node.node import Node
from runner.recovery.combine import combine
from runner.recovery.kinds import Failure, FailureKind
from runner.recovery.policy import AttemptRecord, BatchShape, Restart, Stop, backoff_s, decide, end_of_node
from runner.recovery.restart_state import FINISHED_PATIENCE_S, RunnerProcess, RunRecord, process_namespace
from runner.supervisor.identity import JobIdentity, differences, key_of, summarised
from runner.supervisor.peer_messages import Message
from runner.supervisor.peers import Leader
from runner.supervisor.preflight import check_world_size, counts_samples
from runner.supervisor.session import Life
from runner.system.event_loop import StopRequest
from runner.ui.progress import ProgressDisplay

_TURN_S = 0.5
# Once this machine's part of an attempt is over, the others' runners kill theirs; longer, and they count as lost.
_PEER_END_S = 30.0
_GOOD = (FailureKind.FINISHED, FailureKind.PREEMPTED)
# Ends of a script that say nothing about its checkpoints: it may have got no further.
_NOTHING_DONE = (*_GOOD, FailureKind.BOOT, FailureKind.NETWORK)


class Supervisor:
    """Runs one job to its end; `run` may be called once."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        job: Job,
        display: ProgressDisplay,
        stop: StopRequest,
        *,
        place: str | None = None,
        identity: JobIdentity | None = None,
    ) -> None:
        """
        Args:
            stop: counts signals already.
            identity: of the job; the other nodes' must be the same.
            place: id of the location; None where that could not be asked.
        """
        self._config, self._directory, self._job, self._display = config, directory, job, display
        self._states = StateMachine()
        self._place, self._identity = place, identity
        self._life = Life(config, directory, display, stop)
        self._leader: Leader | None = None
        self._num_nodes = self._local_ranks = 1
        # Of the other machines: those whose processes are up, and how the attempt that runs has ended there.
        self._ready: set[int] = set()
        self._ended: dict[int, Failure] = {}
        self._running = False
        # Nodes whose hardware or driver has failed in the newest attempt.
        self._bad_nodes: set[int] = set()
        self._busy: dict[int, bool] = {}
        self._busy_told = False
        # Of the newest attempt.
        self._last_step = 0
        self._learning_rate_told = self._unsaved_told = self._used_manager = False
        # Why the run has ended.
        self.reason = ""
        # What the rank that ended the run had written to its standard error.
        self.failed_log: Path | None = None
        # Where checkpoints outlive the run's folder.
        self._journal_copy: JournalCopy | None = None

    def run(self) -> ExitCode:
        """Supervise until the run has ended; returns what the process is to exit with."""
        life, config = self._life, self._config
        with life:
            catalog = config.tiers.catalog
            # The journal lies on this machine; another one may have gone on with the run meanwhile.
            life.attempt = max(life.attempt, catalog.newest_attempt())
            newest, over_all_stages = config.tiers.newest_committed()
            self._newest_manifest = next((entry.manifest for entry in catalog.scan() if entry.manifest), None)
            self._memory = RunRecord.from_json(config.tiers.durable.read_note())
            self._memory.lineage = self._memory.lineage or life.run_id
            self._memory.runner = RunnerProcess.current()
            if needs_copy(config):
                self._journal_copy = JournalCopy(self._directory.journal, self._memory.lineage, life.run_id)
            self._display.state.committed_step = newest if newest >= 0 else None
            life.record(
                "run_started",
                run_id=life.run_id,
                pid=os.getpid(),
                runner=dataclasses.asdict(self._memory.runner),
                namespace=process_namespace(),
                committed_step=newest,
                max_restarts=config.restart.max_restarts,
                cost=config.cost.model_dump(),
                location=config.checkpoint_location,
                place=self._place,
            )
            self._node = Node(
                config,
                self._directory,
                self._job,
                life.run_id,
                display=self._display,
                record=life.record,
                clock=life.clock,
                loop=life.loop,
                stop=life.stop,
                runtime=life.runtime,
            )
            self._node.checkpoints.committed_step = over_all_stages
            decision: Stop | None = None
            try:
                decision = self._spent_by_lost_runners()
                if decision is None:
                    if not isinstance(config.tiers.durable, LocalStorage) and self._place is not None:
                        # There is no lock: a second runner must find this one's name as early as can be.
                        self._keep_record()
                    decision = self._supervise()
            except RunnerError as error:
                decision = Stop(error.exit_code, str(error))
            except OSError as error:
                # A full disk, no more descriptors: of this moment, or of this machine.
                place = f"{error.filename}: " if error.filename else ""
                decision = Stop(ExitCode.BUDGET_SPENT, f"this machine refuses: {place}{error.strerror or error}")
            finally:
                self._keep_record()
                if self._journal_copy is not None:
                    self._journal_copy.flush(self._node.keep_file)
                # The others are started again after any end but the good one, and are needed for no commit.
                if decision is None or decision.exit_code is not ExitCode.DONE:
                    self._dismiss_others(decision)
                drained = self._node.close()
            if decision.exit_code is ExitCode.DONE:
                if not drained and not self._last_step_is_durable():
                    why = "trained to the end, but the last checkpoint was not written"
                    decision = Stop(ExitCode.STORAGE_FAILED, why)
                elif self._leader is not None:
                    self._record_end()
                self._dismiss_others(decision)
            decision = end_of_node(decision, 0, self._bad_nodes)
            state = {ExitCode.DONE: RunState.FINISHED, ExitCode.PREEMPTED: RunState.PREEMPTED}.get(
                decision.exit_code, RunState.FAILED
            )
            if state is RunState.PREEMPTED:
                self._states.move(RunState.STOPPING)
            self._states.move(state)
            self.reason = decision.reason
            life.record("run_ended", state=state.value, exit_code=int(decision.exit_code), reason=decision.reason)
            if self._journal_copy is not None:
                self._journal_copy.finish(config.tiers.durable)
        self._display.close()
        return decision.exit_code

    def _dismiss_others(self, decision: Stop | None) -> None:
        """Tell the other nodes how the run has ended; None where it is not known."""
        if self._leader is None:
            return
        if decision is not None:
            for number in sorted(self._leader.present):
                end = end_of_node(decision, number, self._bad_nodes)
                message = {"do": "finish", "exit_code": int(end.exit_code), "reason": end.reason[:5000]}
                self._leader.send(message, number)
        self._leader.close()
        self._leader = None

    def _record_end(self) -> None:
        """Record that the run has finished, before any node exits with 0.

        A runner that is restarted after that, on this node or another, does not wait for the others.
        """
        if self._identity is None or self._node.checkpoints.fenced is not None:
            return
        self._memory.finished = key_of(self._identity)
        # The agent, which keeps the record otherwise, has ended.
        with contextlib.suppress(OSError):
            self._config.tiers.durable.replace_note(self._memory.to_json(self._life.attempt).encode())

    @property
    def _has_finished(self) -> bool:
        """An earlier runner had this very job finished."""
        return self._identity is not None and self._memory.finished == key_of(self._identity)

    def _last_step_is_durable(self) -> bool:
        """An agent that was lost at the very end may have had nothing left to do but to remove older checkpoints."""
        try:
            return Tiers(self._config.tiers.durable).newest_committed()[0] == self._last_step
        except (CheckpointError, OSError):
            return False

    def _spent_by_lost_runners(self) -> Stop | None:
        """Runners before this one may have been killed together with all they had started, again and again."""
        if not self._memory.account_for_lost_runner(self._node.checkpoints.committed_step):
            return None
        self._display.message("the runner before this one ended without a word; that counts as a failure")
        decision = self._decide()
        return decision if isinstance(decision, Stop) else None

    # -- the retry loop ------------------------------------------------------------------------------------------

    def _supervise(self) -> Stop:
        restart = self._config.restart

        def wait(state: tenacity.RetryCallState) -> float:
            decision = state.outcome.result() if state.outcome else None
            assert isinstance(decision, Restart)
            return backoff_s(
                decision.failures_in_a_row,
                initial_s=restart.backoff_initial_s,
                max_s=restart.backoff_max_s,
                jitter_s=restart.backoff_jitter_s,
            )

        def announce_backoff(state: tenacity.RetryCallState) -> None:
            delay = state.next_action.sleep if state.next_action else 0.0
            self._states.move(RunState.BACKOFF)
            self._life.record("backoff", delay_s=round(delay, 3))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda decision: isinstance(decision, Restart)),
            stop=tenacity.stop_never,  # `policy.decide` is the limit: it answers Stop
            wait=wait,
            before_sleep=announce_backoff,
            sleep=self._life.sleep,
        )
        decision = retrying(self._attempt_and_decide)
        assert isinstance(decision, Stop)
        return decision

    def _attempt_and_decide(self) -> Restart | Stop:
        try:
            if not self._life.stop:
                self._node.ensure_processes()
            if not self._life.stop:
                self._gather()
        except HelperKilled as error:
            if not self._life.stop:
                return self._note_down(Failure(FailureKind.LAUNCHER_LOST, str(error)), None)
        except PeersMissing:
            if not self._life.stop:
                if not self._has_finished:
                    raise
                return Stop(ExitCode.DONE, "had finished before; the other nodes are gone")
        except LaunchError:
            if not self._life.stop:
                raise
        if self._life.stop:
            self._tell_stop()
            return Stop(ExitCode.PREEMPTED, "stopped on request before an attempt began")
        failure, log = self._run_attempt()
        return self._note_down(failure, log)

    def _note_down(self, failure: Failure, log: Path | None) -> Restart | Stop:
        """Have it on record, and decide."""
        self._last_step = failure.step
        self._memory.running = None
        if failure.kind is FailureKind.FINISHED:
            self._memory.history.clear()
        elif failure.kind not in (FailureKind.PREEMPTED, FailureKind.ENDED):
            self._memory.add(AttemptRecord(failure, self._node.checkpoints.committed_step))
        decision = self._decide(failure)
        durable = self._config.tiers.durable
        if isinstance(decision, Restart) and isinstance(durable, LocalStorage) and not durable.root.is_dir():
            # Another attempt would start from the beginning, in another folder of that name.
            gone = f"{durable.root} was there when attempt {self._life.attempt} began, and is gone; put it back"
            decision = Stop(ExitCode.STORAGE_FAILED, gone)
        if isinstance(decision, Restart):
            self._memory.batch = decision.batch
            if decision.skip is not None:
                self._memory.skipped.append(decision.skip)
                self._life.record("steps_skipped", first=decision.skip[0], last=decision.skip[1])
            where = f" (log: {log})" if log is not None else ""
            self._display.message(f"step {failure.step}: {decision.reason}; starting again{where}")
        elif log is not None:
            self.failed_log = log
        self._keep_record()
        return decision

    def _decide(self, failure: Failure | None = None) -> Restart | Stop:
        """On the newest failure on record, or on an end that is none."""
        history = list(self._memory.history)
        if failure is not None and (not history or history[-1].failure is not failure):
            history.append(AttemptRecord(failure, self._node.checkpoints.committed_step))
        micro_batch, accumulation = self._node.checkpoints.batch or (None, 1)
        self._memory.batch = BatchShape(micro_batch, accumulation, self._memory.batch.divisor)
        return decide(
            history,
            max_restarts=self._config.restart.max_restarts,
            stop_requested=bool(self._life.stop),
            max_network_retries=self._config.restart.max_network_retries,
            batch=self._memory.batch,
            skips_left=self._config.guards.max_skipped_windows - len(self._memory.skipped),
            # A script without this library does not hear of it.
            can_cut=self._job.script is None or self._used_manager,
        )

    def _keep_record(self) -> None:
        # Once another runner has the run, the record is that one's.
        text = self._memory.to_json(self._life.attempt)
        if self._node.checkpoints.fenced is None and not self._node.note(text):
            with contextlib.suppress(OSError):
                self._config.tiers.durable.replace_note(text.encode())

    def _run_attempt(self) -> tuple[Failure, Path | None]:
        life = self._life
        life.attempt += 1
        self._memory.running, self._memory.finished = life.attempt, ""
        self._keep_record()
        memory = self._memory
        skipped = ",".join(f"{first}-{last}" for first, last in memory.skipped)
        spec = AttemptSpec(
            life.attempt,
            self._num_nodes,
            memory.batch.divisor,
            skipped,
            self._failure_history(),
            memory.lineage,
            memory.lost_steps,
            memory.reached,
            self._job.resume_from,
            self._job.allow_changes,
        )
        self._ended.clear()
        self._states.move(RunState.RUNNING)
        if self._leader is not None:
            self._leader.send({"do": "begin", **spec.to_message()})
        self._running, self._node.others_busy = True, False
        self._busy.clear()
        result = self._node.run_attempt(spec, self._each_turn)
        failure = self._join(result)
        self._running = False
        self._used_manager |= result.used_manager
        unsaved = self._job.script is not None and not self._used_manager and failure.kind not in _NOTHING_DONE
        # One that was stopped may not have come so far.
        if unsaved and not self._unsaved_told and not life.stop:
            self._unsaved_told = True
            self._display.message(
                "the script has used neither resilient() nor a CheckpointManager: nothing is saved, and each attempt "
                "starts from the beginning"
            )
        if result.training_began:
            memory.account_for_steps(result.start_step, failure.step or result.start_step)
        life.record("attempt_ended", **result.event(failure, self._node.checkpoints.committed_step))
        return failure, result.log if failure.rank == result.failure.rank else None

    def _each_turn(self) -> None:
        """While an attempt runs: stops and other machines."""
        if self._journal_copy is not None:
            self._journal_copy.turn(time.monotonic(), self._node.keep_file, self._node.agent_pid)
        self._tell_stop()
        self._check_peers()
        lost = self._others - self._ready - self._ended.keys()
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            self._node.end_attempt(Failure(FailureKind.NODE_LOST, f"machine {names} is gone, or silent for too long"))
        failed = next((failure for failure in self._ended.values() if failure.kind not in _GOOD), None)
        if failed is not None:
            cause = f"ended with another machine's ranks: {failed.cause}"
            self._node.end_attempt(Failure(FailureKind.ENDED, cause), stacks=failed.kind is FailureKind.HUNG)
        if self._leader is not None:
            self._node.others_busy = any(self._busy.values())
            busy = self._node.others_busy or self._node.busy
            if busy != self._busy_told:
                self._busy_told = busy
                self._leader.send({"do": "busy", "busy": busy})

    def _tell_stop(self) -> None:
        if self._life.tell_stop():
            self._states.move(RunState.STOPPING)
            if self._leader is not None:
                self._leader.send({"do": "stop", "reason": self._life.stop.reason})

    def _failure_history(self) -> str:
        """Failures and seconds of this run so far, by its journal."""
        run = summarise(read_journal(self._directory.journal), now=self._life.clock())
        failures = sum(attempt.kind not in NO_FAILURE for attempt in run.attempts)
        return f"{failures}:{run.wall_s - run.time_by_cause[WAITING]:.0f}"

    # -- the other machines --------------------------------------------------------------------------------------

    @property
    def _others(self) -> set[int]:
        return set(range(1, self._num_nodes))

    def _gather(self) -> None:
        """Wait until all machines are there and ready.

        Raises:
            UsageError: the port is taken, or the ranks cannot share the samples of a step.
            PeersMissing: not all have come in time.
        """
        self._num_nodes, self._local_ranks = self._node.shape
        world_size = self._num_nodes * self._local_ranks
        if self._identity is None or counts_samples(self._identity, self._memory):
            check_world_size(self._newest_manifest, world_size)
        if self._job.script is None:
            self._tell_learning_rate(world_size)
        if self._num_nodes == 1:
            return
        launch = self._config.launch
        if self._leader is None:
            try:
                self._leader = Leader(
                    launch.peer_address, self._num_nodes, self._life.loop, self._on_peer, self._refusal
                )
                self._life.loop.every(_TURN_S, self._check_peers)
            except OSError as error:
                raise UsageError(
                    f"launch.peer_port: port {launch.peer_address[1]} cannot be used ({error.strerror}); it is the "
                    "rendezvous port + 1 unless you set it"
                ) from None
        # Nodes that have exited with 0 are not restarted.
        patience_s = min(launch.rendezvous_timeout_s, FINISHED_PATIENCE_S if self._has_finished else math.inf)
        deadline, told = time.monotonic() + patience_s, False
        while not self._life.stop and self._others - self._ready:
            self._life.loop.pump(_TURN_S)
            self._check_peers()
            missing = ", ".join(map(str, sorted(self._others - self._ready)))
            if missing and not told:
                told = True
                self._states.move(RunState.WAITING)
                self._life.record("waiting_for_nodes", nodes=sorted(self._others - self._ready))
                self._display.message(f"waiting for machine {missing} at port {launch.peer_address[1]}")
            if missing and time.monotonic() > deadline:
                raise PeersMissing(
                    f"machine {missing} of {self._num_nodes} has not come within {patience_s:.0f} s "
                    "(launch.rendezvous_timeout_s); start the same command there with its --node-rank"
                )

    def _tell_learning_rate(self, world_size: int) -> None:
        """Once: it is not the number that the user has written."""
        rate = self._config.trainer.get("learning_rate")
        if world_size == 1 or not self._config.scale_learning_rate or self._learning_rate_told or rate is None:
            return
        self._learning_rate_told = True
        self._display.message(
            f"learning rate {rate:g} x {world_size} ranks = {rate * world_size:g} (scale_learning_rate=false leaves it)"
        )

    def _refusal(self, hello: Message) -> str | None:
        """Another node must do the same job; each was told of it by its own command."""
        theirs = JobIdentity.from_json(hello["job"].encode())
        found = differences(self._identity, theirs) if self._identity is not None and theirs is not None else []
        if not found:
            return None
        return (
            f"this node was started for another job than the first one ({summarised(found)}); give the same command "
            "and files everywhere, or pass --allow-changes here"
        )

    def _check_peers(self) -> None:
        if self._leader is not None:
            self._leader.check()
            self._ready &= self._leader.present

    def _on_peer(self, number: int, message: Message) -> None:
        assert self._leader is not None
        match message["do"]:
            case "hello":
                self._ready.discard(number)
                if self._running:
                    # Its runner is a new one, or was cut off: what it had of this attempt is over.
                    lost = Failure(FailureKind.NODE_LOST, f"machine {number} was lost and has come back")
                    self._ended.setdefault(number, lost)
                self._leader.send({"do": "welcome", "run_id": self._life.run_id}, number)
            case "ready" if message["nproc"] != self._local_ranks:
                reason = (
                    f"this node has {message['nproc']} ranks, the first one {self._local_ranks}; give the same "
                    "--nproc-per-node everywhere"
                )
                self._leader.send({"do": "finish", "exit_code": int(ExitCode.USAGE), "reason": reason}, number)
            case "ready":
                self._ready.add(number)
            case "busy":
                self._busy[number] = bool(message["busy"])
            case "stop":
                self._life.stop.ask(f"machine {number}: {message['reason']}")
            case "event" if message["attempt"] == self._life.attempt:
                self._node.checkpoints.handle_forwarded(message["event"], message["details"])
            case "ended" if message["attempt"] == self._life.attempt:
                self._ended[number] = Failure.from_dict(message["failure"])
                self._ready.discard(number)

    def _join(self, result: AttemptResult) -> Failure:
        """Have the attempt over on all machines; one failure of all of theirs."""
        own = result.failure
        if self._leader is None:
            return own
        told = False
        deadline = time.monotonic() + _PEER_END_S + (self._config.restart.grace_s if own.kind in _GOOD else 0.0)
        while True:
            failures = [own, *self._ended.values()]
            if not told and any(failure.kind not in _GOOD for failure in failures):
                told = True
                hung = any(failure.kind is FailureKind.HUNG for failure in failures)
                self._leader.send({"do": "end", "attempt": self._life.attempt, "stacks": hung})
                deadline = min(deadline, time.monotonic() + _PEER_END_S)
            left = self._others & self._leader.present - self._ended.keys()
            if not left or time.monotonic() > deadline:
                break
            self._life.loop.pump(0.05)
            self._check_peers()
        if left and not told:
            self._leader.send({"do": "end", "attempt": self._life.attempt, "stacks": False})
        silent = self._others - self._ended.keys()
        everywhere = {0: own, **self._ended}
        self._bad_nodes = {n for n, failure in everywhere.items() if failure.kind is FailureKind.BAD_NODE}
        lost = [Failure(FailureKind.NODE_LOST, f"machine {n} is gone, or silent for too long") for n in sorted(silent)]
        return combine([own, *(self._ended[number] for number in sorted(self._ended)), *lost])


def check_storage(config: Config) -> tuple[list[str], bool]:
    """Try what the run will need, before anything is started.

    Returns:
        What the user ought to know about the places, and whether the location does not answer: then the run goes on
        from its local tier.

    Raises:
        UsageError: one of them cannot be used; the text says why.
        StorageFull: there is no room.
        StorageUnreachable: it does not answer, and there is no local tier to go on from.
    """
    tiers, caveats, is_away = config.tiers, [], False
    for storage in tiers.nearest_first:
        try:
            caveats.append(storage.probe())
        except OSError as error:
            key = "checkpoint.location" if storage is tiers.durable else "checkpoint.local_tier"
            text = f"{key}={storage.location!r} cannot be used: {error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"{text}; make room, then start again") from None
            if not isinstance(error, StorageTimeout):
                raise UsageError(text) from None
            if tiers.local is None or not tiers.local.steps():
                raise StorageUnreachable(f"{text}; start again when it answers") from None
            is_away = True
            caveats.append(f"{text}; going on from {tiers.local.location}, uploads follow when it answers")
    return [caveat for caveat in caveats if caveat is not None], is_away


def check_resume_step(config: Config, step: int) -> list[str]:
    """Prepare `--resume STEP`: verify it, set newer checkpoints aside; returns where those are kept.

    Raises:
        UsageError: the step is not committed (the text lists those that are), or its files are damaged.
    """
    tiers = config.tiers
    try:
        tiers.catalog.verify(step)
    except InvalidCheckpoint as error:
        raise UsageError(f"--resume {step}: {error}") from None
    return [
        storage.set_aside(newer, "superseded")
        for storage in tiers.nearest_first
        for newer in storage.steps()
        if newer > step
    ]


def summary_of(directory: RunDirectory) -> Any:
    """The fold of a run's journal, as of now."""
    return summarise(read_journal(directory.journal), now=time.time())
