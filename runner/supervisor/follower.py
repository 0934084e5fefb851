"""The runner of every node but the first: does what the leader (`supervisor.py`) asks, and reports how it went."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from checkpointing.errors import CheckpointError
from runner.config.schema import Config
from runner.errors import ExitCode, HelperKilled, LaunchError, PeersMissing, RunnerError
from runner.journal.run_directory import RunDirectory
from runner.node.messages import AttemptSpec, Job
from runner.node.node import Node
from runner.recovery.kinds import Failure, FailureKind
from runner.recovery.restart_state import FINISHED_PATIENCE_S, RunRecord
from runner.supervisor.identity import JobIdentity, key_of
from runner.supervisor.peer_messages import Message
from runner.supervisor.peers import Member
from runner.supervisor.session import Life
from runner.system.event_loop import StopRequest
from runner.ui.progress import ProgressDisplay

_TURN_S = 0.5
# What only the machine that has rank 0 learns, and everybody looks for at the first one.
_FORWARDED = {"training_started", "log", "resumed", "batch_shape"}
# From a stop request to the first machine's answer, where no attempt is running here.
_STOP_PATIENCE_S = 15.0


class Follower:
    """Runs this machine's part of one job to its end; `run` may be called once."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        job: Job,
        display: ProgressDisplay,
        stop: StopRequest,
        *,
        identity: JobIdentity,
        compared: bool = True,
    ) -> None:
        """
        Args:
            stop: counts signals already.
            identity: of the job.
            compared: the first node's job must be the same.
        """
        self._config, self._directory, self._job, self._display = config, directory, job, display
        self._life = Life(config, directory, display, stop)
        self._job_key = key_of(identity)
        described = identity.to_json().decode() if compared else ""
        hello = {"do": "hello", "node_rank": config.launch.node_rank, "job": described}
        self._member = Member(config.launch.peer_address, hello, self._life.loop, self._on_message)
        self._node: Node | None = None
        self._run_id: str | None = None
        self._spec: AttemptSpec | None = None
        # The attempt that the first machine has ended, and whether for a hang.
        self._end_wanted: tuple[int, bool] | None = None
        self._busy_told = False
        self._stop_patience_s = _STOP_PATIENCE_S
        self._finish: Message | None = None
        self._stop_sent = False
        # When the first machine was heard of last, or when waiting for it began; when the record was looked at.
        self._heard_at = self._asked_at = time.monotonic()

    def run(self) -> ExitCode:
        """Follow until the first machine says that the run has ended, or cannot be reached any more."""
        life, location = self._life, self._config.checkpoint_location
        with life:
            life.record("run_started", run_id=life.run_id, pid=os.getpid(), committed_step=-1, location=location)
            host, port = self._config.launch.peer_address
            self._say(f"connecting to the first node at {host}:{port}")
            life.loop.every(_TURN_S, self._turn)
            try:
                exit_code, reason = self._follow()
            except RunnerError as error:
                exit_code, reason = error.exit_code, str(error)
            except OSError as error:
                place = f"{error.filename}: " if error.filename else ""
                exit_code = ExitCode.BUDGET_SPENT
                reason = f"this machine refuses: {place}{error.strerror or error}"
            finally:
                self._member.close()
                if self._node is not None:
                    self._node.close()
            state = {ExitCode.DONE: "finished", ExitCode.PREEMPTED: "preempted"}.get(exit_code, "failed")
            life.record("run_ended", state=state, exit_code=int(exit_code), reason=reason)
        # What there is to see besides is at the first node.
        if exit_code == ExitCode.DONE:
            self._say("the run has finished")
        else:
            state = "stopped" if exit_code == ExitCode.PREEMPTED else "failed"
            print(f"runner: {state}: {reason} (exit code {int(exit_code)})", file=sys.stderr)
        self._display.close()
        return exit_code

    def _follow(self) -> tuple[ExitCode, str]:
        num_killed = 0
        while True:
            if not self._wait(lambda: self._run_id is not None):
                return self._ending()
            try:
                if self._node is not None and self._node.run_id != self._run_id:
                    # Another run goes by this address now; what this machine held is of no use to it.
                    self._node.close()
                    self._node = None
                self._node = self._node or self._new_node()
                if not self._life.stop:
                    self._node.ensure_processes()
            except HelperKilled as error:
                if not self._life.stop:
                    num_killed += 1
                    if num_killed > self._config.restart.max_restarts:
                        raise
                    self._display.message(f"{error}; starting it again")
                    continue
            except LaunchError:
                if not self._life.stop:
                    raise
            if not self._life.stop:
                assert self._node is not None
                self._member.send({"do": "ready", "nproc": self._node.shape[1]})
            if not self._wait(lambda: self._spec is not None or self._run_id is None):
                return self._ending()
            num_killed = 0
            if self._spec is not None:
                self._run_attempt(self._spec)

    def _run_attempt(self, spec: AttemptSpec) -> None:
        assert self._node is not None
        self._spec = None
        self._life.attempt = spec.attempt
        self._say(f"run {self._node.run_id}: attempt {spec.attempt} begins")
        result = self._node.run_attempt(spec, self._each_turn)
        failure = result.failure
        if failure.kind not in (FailureKind.FINISHED, FailureKind.PREEMPTED):
            self._say(f"attempt {spec.attempt} has ended here: {failure.cause}")
        if failure.kind in (FailureKind.FINISHED, FailureKind.PREEMPTED):
            # The others may still publish, or save.
            self._stop_patience_s = _STOP_PATIENCE_S + self._config.restart.grace_s
        self._life.record("attempt_ended", **result.event(failure, self._node.checkpoints.committed_step))
        self._member.send({"do": "ended", "attempt": spec.attempt, "failure": failure.to_dict()})

    def _say(self, text: str) -> None:
        print(f"runner: node {self._config.launch.node_rank}: {text}", flush=True)

    def _each_turn(self) -> None:
        assert self._node is not None
        self._turn()
        if self._node.busy != self._busy_told:
            self._busy_told = self._node.busy
            self._member.send({"do": "busy", "busy": self._busy_told})
        if not self._member.connected:
            cause = "the first machine's runner is gone, or silent for too long"
            self._node.end_attempt(Failure(FailureKind.NODE_LOST, cause))
        elif self._finish is not None or (self._end_wanted or (-1, False))[0] == self._life.attempt:
            stacks = self._end_wanted is not None and self._end_wanted[1]
            self._node.end_attempt(Failure(FailureKind.ENDED, "ended with another machine's ranks"), stacks=stacks)

    def _turn(self) -> None:
        self._member.check()
        if self._member.connected:
            self._heard_at = time.monotonic()
        else:
            # It is another connection's business from now on.
            self._run_id = self._spec = None
            self._stop_sent = self._busy_told = False
        self._life.tell_stop()
        if self._life.stop and not self._stop_sent and self._member.connected:
            self._stop_sent = True
            self._member.send({"do": "stop", "reason": self._life.stop.reason})

    def _wait(self, done: Callable[[], bool]) -> bool:
        """Until something holds; False where the run has ended, or a stop leaves nothing to wait for.

        Raises:
            PeersMissing: the first machine cannot be reached any more.
        """
        stop_at: float | None = None
        limit = self._config.launch.rendezvous_timeout_s
        self._heard_at = self._asked_at = time.monotonic()
        while not done():
            self._life.loop.pump(_TURN_S)
            self._turn()
            now = time.monotonic()
            if self._finish is not None:
                return False
            if self._life.stop:
                stop_at = stop_at or now + self._stop_patience_s
                if self._life.stop.at_once or now > stop_at or not self._member.connected:
                    return False
            if self._has_finished(now):
                self._finish = {
                    "exit_code": int(ExitCode.DONE),
                    "reason": "had finished before; the first node is gone",
                }
                return False
            if now - self._heard_at > limit:
                host, port = self._config.launch.peer_address
                raise PeersMissing(
                    f"the first machine's runner cannot be reached at {host}:{port} for {limit:.0f} s "
                    f"(launch.rendezvous_timeout_s): {self._member.last_error}"
                )
        return True

    def _has_finished(self, now: float) -> bool:
        """Whether the record beside the checkpoints says that this job has finished; read every 30 s of silence."""
        if now - max(self._heard_at, self._asked_at) < FINISHED_PATIENCE_S:
            return False
        self._asked_at = now
        try:
            note = self._config.tiers.durable.read_note()
        except (CheckpointError, OSError):
            return False
        return RunRecord.from_json(note).finished == self._job_key

    def _ending(self) -> tuple[ExitCode, str]:
        if self._finish is None:
            return ExitCode.PREEMPTED, "stopped on request"
        return ExitCode(self._finish["exit_code"]), self._finish["reason"]

    def _new_node(self) -> Node:
        assert self._run_id is not None
        life = self._life
        return Node(
            self._config,
            self._directory,
            self._job,
            self._run_id,
            display=self._display,
            record=self._record,
            clock=self._life.clock,
            loop=life.loop,
            stop=life.stop,
            runtime=life.runtime,
        )

    def _record(self, event: str, **details: Any) -> None:
        self._life.record(event, **details)
        # With a script of the user's, every machine sees by itself when training begins.
        if event in _FORWARDED and details.get("total_steps", 0) is not None:
            self._member.send({"do": "event", "event": event, "details": details, "attempt": self._life.attempt})

    def _on_message(self, message: Message) -> None:
        match message["do"]:
            case "welcome":
                self._run_id = str(message["run_id"])
            case "begin":
                self._spec = AttemptSpec.from_message(message)
                if self._node is not None:
                    self._node.others_busy = False
            case "end":
                self._end_wanted = (int(message["attempt"]), bool(message["stacks"]))
            case "busy":
                if self._node is not None:
                    self._node.others_busy = bool(message["busy"])
            case "stop":
                self._life.stop.ask(message["reason"])
            case "finish":
                self._finish = message
