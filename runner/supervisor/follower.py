"""The runner of every node but the leader's: it does what the leader (`supervisor.py`) asks, and reports back.

Where the leader is gone for good, and the run is elastic, one of them leads (`leadership.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from checkpointing.agent.events import Event, TrainingStarted
from runner.errors import ExitCode, LaunchDelayed, LaunchError, PeersMissing, RunnerError
from runner.journal.attempts import AttemptSpec, Job
from runner.journal.events import RunStarted
from runner.lease.leadership import Takeover
from runner.node.node import Node
from runner.peers import messages
from runner.peers.auth import configured_secret, read_secret
from runner.peers.link import Member
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import Stop
from runner.recovery.restart_state import FINISHED_PATIENCE_S
from runner.session.bad_machines import this_machine
from runner.session.identity import JobIdentity, key_of
from runner.session.session import Session
from runner.supervisor.run_record import end_of_error, ended, finished_job
from runner.supervisor.supervisor import make_node
from runner.system.text import visible

_TURN_S = 0.5
# From a stop request to the leader's answer while no attempt runs here.
_STOP_PATIENCE_S = 15.0


class Follower:
    """Runs this node's part of one job to its end.

    The leader's job must be the same if they are `compared`. Without a takeover, this node cannot lead in place of a
    leader that is gone.
    """

    def __init__(
        self,
        session: Session,
        job: Job,
        *,
        identity: JobIdentity,
        compared: bool = True,
        takeover: Takeover | None = None,
        build_node: Callable[..., Node] = Node,
        connect: Callable[..., Member] = Member,
    ) -> None:
        self._session, self._job, self._takeover = session, job, takeover or Takeover(session, None, None)
        self._config, self._display = session.config, session.display
        self._build_node = build_node
        self._job_key = key_of(identity)
        described = identity.to_json().decode() if compared else ""
        hello = messages.Hello(node_rank=self._config.launch.node_rank, job=described, machine=this_machine())
        secret = partial(read_secret, self._config.tiers.durable)
        self._member = connect(
            self._config.launch.peer_address, hello, session.loop, self._on_message, read_secret=secret
        )
        self._node: Node | None = None
        # Of the present connection's leader; None without one.
        self._run_id: str | None = None
        self._num_connections = 0
        self._joins_running = False
        # How often a process of this node was killed as it started, since the last attempt.
        self._num_killed = 0
        self._spec: AttemptSpec | None = None
        # The newest attempt that the leader has ended.
        self._end: messages.End | None = None
        self._busy_sent = self._stop_sent = False
        self._stop_patience_s = _STOP_PATIENCE_S
        self._finish: messages.Finish | None = None
        # When the leader was heard last, or when waiting for it began; when the restart state was read last.
        self._heard_at = self._asked_at = session.monotonic()

    def run(self) -> ExitCode:
        """Follow until the run has ended, or the leader is out of reach; return the exit code. May be called once."""
        session = self._session
        with session:
            location = self._config.checkpoint_location
            session.record(RunStarted(run_id=session.run_id, pid=os.getpid(), location=location, leads=False))
            self._say("connecting to the leader at {}:{}".format(*self._config.launch.peer_address))
            session.loop.every(_TURN_S, self._turn)
            try:
                end = self._follow()
            except (RunnerError, OSError) as error:
                end = end_of_error(error)
            finally:
                self._member.close()
                if self._node is not None and self._takeover.lease is None:
                    self._node.close()
            led = self._takeover.lead(self._node)
            if led is not None:
                return led
            session.record(ended(end))
        # The leader shows everything else.
        if end.exit_code == ExitCode.DONE:
            self._say("the run has finished")
        else:
            outcome = "stopped" if end.exit_code == ExitCode.PREEMPTED else "failed"
            print(f"runner: {outcome}: {visible(end.reason)} (exit code {int(end.exit_code)})", file=sys.stderr)
        self._display.close()
        return end.exit_code

    def _follow(self) -> Stop:
        configured_secret()  # A mistake in it is not one to wait for.
        while self._wait(lambda: self._run_id is not None) and self._take_part(self._num_connections):
            pass
        if self._finish is None:
            return Stop(ExitCode.PREEMPTED, "stopped on request")
        return Stop(ExitCode(self._finish.exit_code), self._finish.reason)

    def _take_part(self, connection: int) -> bool:
        """Take part in one attempt, unless the connection of that number is lost before; return as `_wait` does."""

        def is_lost() -> bool:
            # There may be another one already, to a leader of another run, which knows nothing of this node.
            return self._run_id is None or self._num_connections != connection

        node = self._current_node()
        if not self._start_processes(node):
            return True
        if self._joins_running:
            self._joins_running = False
            node.prepare()
        # An attempt may be paused for this node alone.
        if not self._wait(lambda: node.is_warm or bool(self._session.stop) or is_lost()):
            return False
        if is_lost():
            return True
        if not self._session.stop:
            self._member.send(messages.Ready(nproc=node.shape[1], has_state=node.has_state))
        if not self._wait(lambda: self._spec is not None or is_lost()):
            return False
        self._num_killed = 0
        if self._spec is not None and not is_lost():
            spec, self._spec = self._spec, None
            self._run_attempt(node, spec)
        return True

    def _start_processes(self, node: Node) -> bool:
        """Start what does not run; return False if a process was killed, and this is to be called again.

        That may happen `restart.max_restarts` times between two attempts. During a stop, failures do not matter any
        more.
        """
        session = self._session
        if session.stop:
            return True
        try:
            node.ensure_processes()
        except LaunchDelayed as error:
            if session.stop:
                return True
            self._num_killed += 1
            if self._num_killed > self._config.restart.max_restarts:
                raise
            session.display.message(f"{error}; restarting it")
            # A limit of processes, for example, refuses at once, and again.
            session.sleep(float(self._num_killed))
            return False
        except LaunchError:
            if not session.stop:
                raise
        return True

    def _current_node(self) -> Node:
        """Return the node of the leader's run."""
        if self._node is not None and self._node.run_id != self._run_id:
            # Another run uses the leader's address now; what this node holds is of no use to it.
            self._node.close()
            self._node = None
        if self._node is None:
            assert self._run_id is not None
            self._node = make_node(self._session, self._job, self._run_id, record=self._record, build=self._build_node)
        return self._node

    def _run_attempt(self, node: Node, spec: AttemptSpec) -> None:
        self._session.attempt = spec.attempt
        self._takeover.attempt(spec)
        self._say(f"run {node.run_id}: attempt {spec.attempt} begins")
        result = node.run_attempt(spec, lambda: self._each_turn(node))
        failure = result.failure
        if failure.kind.is_orderly:
            # The others may still publish, or save.
            self._stop_patience_s = _STOP_PATIENCE_S + self._config.restart.grace_s
        else:
            self._say(f"attempt {spec.attempt} has ended here: {failure.cause}")
        self._session.record(result.event(failure, node.checkpoints.committed_step))
        # That this node was asked to stop is news to the leader before the end that this caused.
        self._turn()
        self._member.send(messages.Ended(attempt=spec.attempt, failure=failure))

    def _say(self, text: str) -> None:
        print(f"runner: node {self._config.launch.node_rank}: {visible(text)}", flush=True)

    def _each_turn(self, node: Node) -> None:
        """Handle the leader and requests while an attempt runs."""
        self._turn()
        self._session.pass_on_save(node.save_now, saves=not node.saves_nothing)
        if node.busy != self._busy_sent:
            self._busy_sent = node.busy
            self._member.send(messages.Busy(busy=self._busy_sent))
        is_over = self._end is not None and self._end.attempt == self._session.attempt
        if not self._member.connected:
            node.end_attempt(Failure(FailureKind.NODE_LOST, "the leader is gone, or silent for too long"))
        elif self._finish is not None or is_over:
            stacks = self._end is not None and self._end.stacks
            node.end_attempt(Failure(FailureKind.ENDED, "ended with another node's ranks"), stacks=stacks)

    def _turn(self) -> None:
        self._member.check()
        if self._takeover.lease is not None:
            return
        if self._member.connected:
            self._heard_at = self._session.monotonic()
        else:
            self._takeover.look(self._member, self._node)
            # The next connection may be to another run.
            self._run_id = self._spec = None
            self._stop_sent = self._busy_sent = False
        self._session.announce_stop(saves=self._node is None or self._node.saves)
        if self._session.stop and not self._stop_sent and self._member.connected:
            self._stop_sent = True
            self._member.send(messages.StopRun(reason=self._session.stop.reason))

    def _wait(self, done: Callable[[], bool]) -> bool:
        """Wait until something holds; return False if the run has ended, this node leads, or a stop ends the wait."""
        session, limit_s = self._session, self._config.launch.rendezvous_timeout_s
        stop_at: float | None = None
        self._heard_at = self._asked_at = session.monotonic()
        while not done():
            session.loop.pump(_TURN_S)
            self._turn()
            now = session.monotonic()
            if self._finish is not None or self._takeover.lease is not None:
                return False
            if session.stop:
                stop_at = stop_at or now + self._stop_patience_s
                if session.stop.at_once or now > stop_at or not self._member.connected:
                    return False
            if self._has_finished(now):
                self._finish = messages.Finish(exit_code=0, reason="had finished before; the leader is gone")
                return False
            if now - self._heard_at > limit_s:
                host, port = self._config.launch.peer_address
                raise PeersMissing(
                    f"the leader at {host}:{port} has not answered for {limit_s:.0f} s (launch.rendezvous_timeout_s): "
                    f"{self._member.last_error}; start the first node, or correct --rdzv-endpoint"
                )
        return True

    def _has_finished(self, now: float) -> bool:
        """Return whether the restart state says that this job has finished; read every 30 s of silence."""
        if now - max(self._heard_at, self._asked_at) < FINISHED_PATIENCE_S:
            return False
        self._asked_at = now
        return finished_job(self._config.tiers.durable) == self._job_key

    def _record(self, event: Event) -> None:
        self._session.record(event)
        # With a user's script every node learns by itself when training begins.
        known_everywhere = isinstance(event, TrainingStarted) and event.total_steps is None
        if isinstance(event, messages.FORWARDED) and not known_everywhere and self._takeover.lease is None:
            self._member.send(messages.Forwarded(attempt=self._session.attempt, event=event))

    def _on_message(self, message: messages.ToMember) -> None:
        match message:
            case messages.Welcome(run_id=run_id, epoch=epoch, running=running):
                self._run_id, self._spec, self._joins_running = run_id, None, running
                self._num_connections += 1
                self._takeover.follow(epoch)
            case messages.Begin(spec=spec):
                self._spec = spec
                if self._node is not None:
                    self._node.others_busy = False
            case messages.End():
                self._end = message
            case messages.Busy(busy=busy):
                if self._node is not None:
                    self._node.others_busy = busy
            case messages.StopRun(reason=reason):
                self._session.stop.ask(reason)
            case messages.Finish():
                self._finish = message
            case _:
                pass
