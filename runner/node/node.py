"""One node's part of a run: its helper processes, and one attempt after the other.

The node starts them, watches and ends them, and reports how each attempt ended. The supervisor decides what follows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpointing.agent.protocol import Message
from checkpointing.host.threads import in_background
from runner.config.checks import check_has_gpu, check_has_rank, check_promised_gpu, check_same_nnodes, shape_of
from runner.config.schema import Config
from runner.journal.attempts import AttemptResult, AttemptSpec, Job
from runner.journal.events import AgentEndedEarly, ColdStart, Record
from runner.journal.journal import SteadyClock
from runner.journal.run_directory import RunDirectory
from runner.launcher.build_locks import BuildLocks
from runner.launcher.launch_request import launch_request, preparation
from runner.node.agent_events import AgentEvents
from runner.node.attempt import Attempt
from runner.node.helper_processes import HelperStarter
from runner.node.helpers import Helpers
from runner.ranks.watch import RankEvents
from runner.recovery.failure import Failure
from runner.system.cache import is_sealed
from runner.system.event_loop import EventLoop, StopRequest
from runner.system.processes import Host
from runner.ui.progress import ProgressDisplay

# Seconds between turns while ranks train: events wake the loop, and these turns notice what shows only with time.
_TURN_S = 0.5
_SOON_S = 0.05


class Node:
    """This node's part of a run: helper processes, and one attempt at a time.

    Attributes:
        run_id: Identity of the run, equal on all nodes.
        checkpoints: What the agent of this node has reported.
        others_busy: Whether a rank of another node is legitimately not computing steps.
        has_state: Whether the agent may hold a snapshot: an attempt has run here.
        leads: Whether this node leads the run, and so commits.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        job: Job,
        run_id: str,
        *,
        display: ProgressDisplay,
        record: Record,
        clock: SteadyClock,
        loop: EventLoop,
        stop: StopRequest,
        runtime: Path,
        check_gpus: Callable[[], None] = lambda: None,
        host: Host | None = None,
        starter: HelperStarter | None = None,
    ) -> None:
        """Prepare; nothing is started.

        Sockets are in `runtime`, a folder that the caller removes. `check_gpus` is called when GPUs are found, and
        raises `GpuFaulty` if they cannot be trusted. The host and the starter of helpers are real ones by default.
        """
        self._config, self._directory, self._job, self.run_id = config, directory, job, run_id
        self._display, self._record, self._clock, self._loop, self._stop = display, record, clock, loop, stop
        self._host = host or Host()
        self.checkpoints = AgentEvents(display, record)
        display.state.activity = "loading torch"
        self.others_busy = self.has_state = self.leads = False
        self._attempt: Attempt | None = None
        self._patience = 1.0
        # A checkpoint of a later step was asked for, and is not committed yet.
        self._save_after: int | None = None
        self._build_locks = BuildLocks(os.environ, display.message)
        # Whether ranks are fresh interpreters instead of forks of a preloaded one.
        self._cold = config.launch.cold
        starter = starter or HelperStarter(config, directory, run_id, runtime, lambda: self.leads, job.program)
        self._helpers = Helpers(
            start_agent=starter.start_agent,
            start_launcher=starter.start_launcher,
            on_agent=self.checkpoints.handle,
            on_launcher=self._on_launcher,
            on_agent_timeout=self._on_agent_timeout,
            check_gpus=check_gpus,
            each_turn=display.refresh,
            grace_s=config.restart.grace_s,
            quiet_timeout_s=config.restart.quiet_timeout_s,
            loop=loop,
            stop=stop,
            host=self._host,
        )
        self._events = RankEvents(runtime)
        loop.register(self._events.sock, lambda _: self._on_rank_events())

    def ensure_processes(self) -> None:
        """Start the agent and the launcher unless they are running; return early if a stop is requested.

        Raises:
            LaunchError: One of them cannot be started.
            LaunchDelayed: One of them was killed meanwhile, or may start later.
        """
        self._helpers.ensure()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of nodes, and of ranks on this one; known once the processes have started.

        Raises:
            UsageError: Processes and nodes do not fit together.
            GpuMissing: The GPUs of this node cannot be used.
        """
        accelerators = self._helpers.accelerators
        assert accelerators is not None
        if not accelerators and self._helpers.torch_has_cuda:
            check_promised_gpu(self._config, os.environ, Path("/dev"))
        if not accelerators:
            check_has_gpu(self._config)
        nnodes, nproc = shape_of(self._config, accelerators)
        check_has_rank(self._config, nnodes)
        return nnodes, nproc

    @property
    def is_warm(self) -> bool:
        """Whether ranks can start without delay, as far as that can be waited for."""
        return self._helpers.is_warm or self._cold

    def prepare(self) -> None:
        """Have the data of the bundled job prepared, if nothing is yet; `is_warm` says when that is over."""
        if self._job.program is None and not self._cold and not is_sealed(self._directory.cache):
            self._helpers.prepare(preparation(self._config, self._directory))

    @property
    def agent_pid(self) -> int:
        """Process id of the agent; 0 if there is none."""
        agent = self._helpers.agent
        return agent.pid if agent is not None and agent.alive else 0

    @property
    def busy(self) -> bool:
        """Whether a rank of this node is legitimately not computing steps."""
        return self._attempt is not None and self._attempt.hangs.watchdog.busy

    def note(self, text: str) -> bool:
        """Have the agent write the restart state next to the checkpoints; returns False if there is no agent."""
        return self._helpers.request_agent("restart_state", text=text)

    def keep_file(self, name: str, path: Path, start: int, end: int) -> bool:
        """Have the agent write bytes of a file next to the checkpoints; returns False if there is no agent."""
        return self._helpers.request_agent("sidecar", name=name, path=str(path), start=start, end=end)

    def close(self) -> bool:
        """Wait until all snapshots are committed, then end all processes; returns whether all are committed."""
        self._loop.unregister(self._events.sock)
        drained = self._helpers.close()
        self._host.kill_all(self._host.descendants)
        self._events.close()
        return drained

    # -- attempts ----------------------------------------------------------------------------------------------------

    def run_attempt(self, spec: AttemptSpec, each_turn: Callable[[], None] = lambda: None) -> AttemptResult:
        """Run an attempt until no process of it is left; returns how it ended.

        `each_turn` is called about twice per second and after every event; it may call `end_attempt`.
        """
        attempt = self._attempt = self._begin(spec)
        attempt.hangs.watchdog.patience = self._patience
        while attempt.result is None:
            self._loop.pump(_SOON_S if attempt.ending else _TURN_S)
            each_turn()
            attempt.turn(others_busy=self.others_busy)
            self.checkpoints.show_heartbeats(attempt.heartbeats(), self._host.monotonic())
        self.checkpoints.show_heartbeats(attempt.heartbeats(), self._host.monotonic())
        attempt.close()
        self._helpers.end_attempt()
        result = attempt.conclude(self._clock.at)
        self._attempt, self._patience = None, attempt.hangs.next_patience
        return replace(result, failure=self._choose_start_method(result.failure))

    def end_attempt(self, verdict: Failure, *, stacks: bool = False) -> None:
        """Kill the ranks of the running attempt, if there is one, because of `verdict`; see `Attempt.end`."""
        if self._attempt is not None:
            self._attempt.end(verdict, stacks=stacks)

    @property
    def is_training(self) -> bool:
        """Whether the ranks of the running attempt take steps."""
        return self._attempt is not None and self._attempt.graceful.is_training

    @property
    def saves(self) -> bool:
        """Whether the ranks of the running attempt save when they are asked to stop; True without one."""
        return self._attempt is None or self._attempt.graceful.saves

    @property
    def saves_nothing(self) -> bool:
        """Whether the program takes steps, and nothing of it is saved; not known while it loads."""
        return self._attempt is not None and self._attempt.has_stepped and not self._attempt.graceful.saves

    def save_now(self) -> int:
        """Have the ranks commit their state at the next step, in the next attempt if this one does not come to that.

        Returns:
            The last step that has ended.
        """
        beats = self._attempt.heartbeats() if self._attempt is not None else []
        self._save_after = max((beat.step for beat in beats), default=self.checkpoints.newest_commit)
        self._helpers.request_agent("request_save")
        return self._save_after

    def pause_attempt(self) -> None:
        """End the running attempt at a step boundary, on all nodes; its last step is committed before."""
        if self._attempt is not None:
            self._attempt.graceful.paused = True

    def _begin(self, spec: AttemptSpec) -> Attempt:
        agent, launcher = self._helpers.agent, self._helpers.launcher
        assert agent is not None and launcher is not None
        nnodes, nproc = self.shape
        check_same_nnodes(nnodes, spec.run_nodes)
        log_dir = self._directory.logs / f"attempt-{spec.attempt}"
        with contextlib.suppress(RuntimeError):
            in_background(lambda: self._directory.remove_old_logs(spec.attempt), "old-logs")
        self._build_locks.begin_attempt(self._clock())
        attempt = Attempt(
            spec,
            config=self._config,
            job=self._job,
            nproc=nproc,
            log_dir=log_dir,
            helpers=self._helpers,
            checkpoints=self.checkpoints,
            display=self._display,
            record=self._record,
            clock=self._clock,
            loop=self._loop,
            stop=self._stop,
            host=self._host,
            read_rank_messages=self._on_rank_events,
        )
        self._helpers.pulse.restart(self._host.monotonic())
        self.checkpoints.begin_attempt(spec.attempt)
        fetch = self.has_state or not spec.held
        agent.request("begin_attempt", attempt=spec.attempt, fetch=fetch, commits=self.leads)
        # The leader's agent commits, and so knows whether it was; any node's ranks may ask.
        if self.leads and self._save_after is not None and self.checkpoints.newest_commit <= self._save_after:
            agent.request("request_save")
        self.has_state = True
        self._record(spec.started(launcher.pid, agent.pid))
        launcher.send(
            launch_request(
                spec,
                config=self._config,
                directory=self._directory,
                job=self._job,
                run_id=self.run_id,
                nproc=nproc,
                accelerators=self._helpers.accelerators or 0,
                cold=self._cold,
                agent_socket=agent.process.socket_path,
                event_socket=self._events.path,
                log_dir=log_dir,
                committed_step=self.checkpoints.committed_step,
                inherited=os.environ,
            )
        )
        return attempt

    def _choose_start_method(self, failure: Failure) -> Failure:
        """Change to fresh interpreters if forks cannot use the GPU; return the failure, revised."""
        if self._cold:
            # Forking is not the cause, and another attempt would not help.
            return replace(failure, may_pass=failure.may_pass and not failure.in_fork, in_fork=False)
        if failure.in_fork:
            self._cold = True
            self._record(ColdStart(reason=failure.cause))
            self._display.message(
                "a module that is imported before the ranks are forked has initialized the GPU driver, which forks "
                "cannot use then; from now on ranks start as fresh interpreters, which takes some seconds more (--cold "
                "does so from the beginning)"
            )
        return failure

    # -- what helpers and ranks report -------------------------------------------------------------------------------

    def _on_launcher(self, message: Message) -> None:
        if self._attempt is not None:
            self._attempt.on_launcher(message)

    def _on_rank_events(self) -> None:
        for message in self._events.receive():
            # Unread messages of ranks of an earlier attempt are dropped.
            if self._attempt is not None and message.in_attempt == self._attempt.spec.attempt:
                self._attempt.on_rank(message)

    def _on_agent_timeout(self, waited_s: float) -> None:
        self._record(AgentEndedEarly(waited_s=round(waited_s, 1)))
        self._display.message(
            f"the checkpoint agent was killed after {waited_s:.0f} s; what it was writing is not committed"
        )
