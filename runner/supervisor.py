"""The loop that keeps a run going: starts attempts, sees them end, decides, waits, starts the next.

One thread and one selector. Signal handlers set a flag; every wait goes through `_pump`, so all of them can be
interrupted. Whatever happens, no process of the run is left when `run` returns.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tenacity

from checkpointing import protocol
from checkpointing.arena import Phase
from checkpointing.client import ATTEMPT_ENV, SOCKET_ENV
from checkpointing.errors import InvalidCheckpoint
from checkpointing.manager_environment import FAILURES_ENV, LOCAL_TIER_ENV, LOCATION_ENV, RESUME_ENV
from checkpointing.protocol import Message
from runner import processes
from runner.config import Config
from runner.errors import ExitCode, LaunchError, RunnerError, UsageError
from runner.failure import Failure, FailureKind, classify
from runner.journal import Journal, read_journal
from runner.links import AgentLink, LauncherLink, RankEvents, RankWatch
from runner.policy import AttemptRecord, Restart, Stop, decide
from runner.progress import ProgressDisplay
from runner.run_directory import RunDirectory
from runner.states import RunState, StateMachine
from runner.summary import summarise

_TICK_S = 0.1
# A first rank's death → SIGKILL of the others: time for them to write the errors that the death caused.
_PEER_GRACE_S = 0.5
# Imports on a cold, slow disk.
_LAUNCHER_TIMEOUT_S = 600.0
# A commit to slow storage; what takes longer is a storage that hangs.
_AGENT_TIMEOUT_S = 600.0
# The same, once the user has asked twice: a snapshot that is whole is worth a moment.
_AGENT_HURRY_S = 5.0
_NO_FAILURE = {"running", FailureKind.FINISHED.value, FailureKind.PREEMPTED.value, FailureKind.ENDED.value}


@dataclass(frozen=True)
class Job:
    """What to run: the default job, or a script of the user's."""

    script: str | None = None
    args: tuple[str, ...] = ()


@dataclass
class _Attempt:
    """The attempt that is alive."""

    number: int
    watch: RankWatch = field(default_factory=RankWatch)
    result: Message | None = None
    kill_at: float | None = None
    stop_deadline: float | None = None
    announced: bool = False
    ended_on_request: bool = False


class Supervisor:
    """Runs one job to its end; `run` may be called once."""

    def __init__(self, config: Config, directory: RunDirectory, job: Job, display: ProgressDisplay) -> None:
        self._config = config
        self._directory = directory
        self._job = job
        self._display = display
        self._is_first_node = config.launch.node_rank == 0
        self._states = StateMachine()
        self._history: list[AttemptRecord] = []
        self._attempt: _Attempt | None = None
        self._num_signals = 0
        self._stop_announced = False
        self._attempt_over = False
        # Why no attempt of ours may write any more.
        self._fenced: str | None = None
        # By tier: saves that it has refused since the last one that it took, and why the newest was.
        self._failed_saves: dict[str, tuple[int, str]] = {}
        self._selector = selectors.DefaultSelector()
        self._agent: AgentLink | None = None
        self._launcher: LauncherLink | None = None
        self._accelerators: int | None = None
        self._failed_log: Path | None = None

    def run(self) -> ExitCode:
        """Supervise until the run has ended; returns what the process is to exit with."""
        processes.become_subreaper()
        run_id = self._run_id = self._directory.run_id()
        strays = processes.kill_all(lambda: processes.processes_of_run(run_id, self._config.launch.node_rank))
        events = read_journal(self._directory.journal)
        catalog = self._config.tiers.catalog
        # The journal lies on this machine; another one may have gone on with the run meanwhile.
        self._last_attempt = max((event["attempt"] for event in events), default=0)
        self._last_attempt = max(self._last_attempt, catalog.newest_attempt())
        committed = catalog.committed_steps()
        self._committed_step = committed[-1] if committed else -1
        self._display.state.committed_step = committed[-1] if committed else None
        self._journal = Journal(self._directory.journal)
        self._record("run_started", run_id=run_id, pid=os.getpid(), committed_step=self._committed_step)
        if strays:
            self._display.message(f"ended {strays} processes that an earlier life of this run had left")
        self._install_signal_handlers()
        with tempfile.TemporaryDirectory(prefix="runner-") as runtime:
            self._runtime = Path(runtime)
            self._events = RankEvents(self._runtime)
            self._selector.register(self._events.sock, selectors.EVENT_READ, self._on_rank_events)
            try:
                decision = self._supervise()
            except RunnerError as error:
                decision = Stop(error.exit_code, str(error))
            finally:
                self._close()
        state = {ExitCode.DONE: RunState.FINISHED, ExitCode.PREEMPTED: RunState.PREEMPTED}.get(
            decision.exit_code, RunState.FAILED
        )
        if state is RunState.PREEMPTED:
            self._states.move(RunState.STOPPING)
        self._states.move(state)
        self._record("run_ended", state=state.value, exit_code=int(decision.exit_code), reason=decision.reason)
        self._journal.close()
        self._display.close()
        return decision.exit_code

    # -- the retry loop ------------------------------------------------------------------------------------------

    def _supervise(self) -> Stop:
        restart = self._config.restart

        def count_since_progress(state: tenacity.RetryCallState) -> None:
            # tenacity's backoff grows with its attempt number; ours starts anew when a step was committed.
            decision = state.outcome.result() if state.outcome else None
            if isinstance(decision, Restart):
                state.attempt_number = decision.failures_in_a_row

        def announce_backoff(state: tenacity.RetryCallState) -> None:
            delay = state.next_action.sleep if state.next_action else 0.0
            self._states.move(RunState.BACKOFF)
            self._record("backoff", delay_s=round(delay, 3))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda decision: isinstance(decision, Restart)),
            stop=tenacity.stop_never,  # `policy.decide` is the limit: it answers Stop
            wait=tenacity.wait_exponential_jitter(
                initial=restart.backoff_initial_s, max=restart.backoff_max_s, jitter=restart.backoff_jitter_s
            ),
            after=count_since_progress,
            before_sleep=announce_backoff,
            sleep=self._sleep,
        )
        decision = retrying(self._attempt_and_decide)
        assert isinstance(decision, Stop)
        return decision

    def _attempt_and_decide(self) -> Restart | Stop:
        try:
            self._ensure_processes()
        except LaunchError:
            if not self._stop_requested:
                raise
        if self._stop_requested:
            return Stop(ExitCode.PREEMPTED, "stopped on request before an attempt began")
        self._history.append(self._run_attempt())
        decision = decide(
            self._history,
            max_restarts=self._config.restart.max_restarts,
            stop_requested=self._stop_requested,
        )
        if isinstance(decision, Restart):
            failure = self._history[-1].failure
            self._display.message(f"step {failure.step}: {decision.reason}; starting again")
        if self._failed_log is not None:
            self._display.message(f"its log: {self._failed_log}")
        return decision

    def _run_attempt(self) -> AttemptRecord:
        assert self._agent is not None and self._launcher is not None
        self._last_attempt += 1
        attempt = self._attempt = _Attempt(self._last_attempt)
        self._display.state.attempt = attempt.number
        self._display.state.activity = "starting"
        self._agent.tell("begin_attempt", attempt=attempt.number, fetch=True)
        self._record("attempt_started", launcher_pid=self._launcher.pid, agent_pid=self._agent.pid)
        self._states.move(RunState.RUNNING)
        self._launcher.send(self._launch_request(attempt.number))
        while attempt.result is None:
            self._pump(_TICK_S)
            self._watch_attempt(attempt)
        self._show_heartbeat()
        attempt.watch.kill()
        for pidfd in list(attempt.watch.pidfds):
            self._selector.unregister(pidfd)
        attempt.watch.close()
        processes.kill_all(self._strays)
        processes.reap_strays({self._agent.pid, self._launcher.pid})
        self._end_attempt_at_agent()
        failure, beats = self._conclude(attempt)
        self._record(
            "attempt_ended",
            kind=failure.kind.value,
            cause=failure.cause,
            rank=failure.rank,
            step=failure.step,
            start_step=max((beat.start_step for beat in beats), default=0),
            training_began=round(max((beat.start_time for beat in beats), default=0.0), 3),
            last_step_at=round(max((beat.time for beat in beats if beat.start_time), default=0.0), 3),
            committed_step=self._committed_step,
        )
        self._failed_log = attempt.watch.log(failure.rank)
        self._attempt = None
        return AttemptRecord(failure, self._committed_step)

    def _watch_attempt(self, attempt: _Attempt) -> None:
        """What needs an answer while the ranks run: a death, a lost helper process, a stop request."""
        assert self._agent is not None and self._launcher is not None
        now = time.monotonic()
        if attempt.watch.failed and attempt.kill_at is None:
            attempt.kill_at = now + _PEER_GRACE_S
        if not self._agent.alive or self._fenced is not None:
            attempt.kill_at = now
        if not self._launcher.alive:
            # The fork server ends with it and takes the ranks along; the sweep gets what is left.
            attempt.result = {"finished": False, "failures": [], "launcher_lost": True}
        if self._stop_requested or self._storage_failed:
            if attempt.stop_deadline is None:
                attempt.stop_deadline = now + self._config.restart.grace_s
                self._agent.tell("request_stop")
                self._ask_script_to_stop(attempt)
            if self._num_signals > 1 or now > attempt.stop_deadline or not self._may_stop_in_order(attempt):
                attempt.kill_at = now
                attempt.ended_on_request = True
        if attempt.kill_at is not None and now >= attempt.kill_at:
            attempt.watch.kill()
            if not attempt.watch.pidfds:
                # Ranks that are forked but have not introduced themselves yet.
                processes.kill_all(self._strays, timeout_s=0.2)

    @property
    def _storage_failed(self) -> bool:
        limit = self._config.checkpoint.max_failed_saves
        return limit is not None and any(count >= limit for count, _ in self._failed_saves.values())

    def _may_stop_in_order(self, attempt: _Attempt) -> bool:
        """Whether waiting can save anything: a training loop is there, or a script that may have its own answer."""
        if any(beat.phase in (Phase.TRAINING, Phase.SAVING, Phase.DONE) for beat in self._beats()):
            return True
        return self._job.script is not None and bool(attempt.watch.pidfds)

    def _ask_script_to_stop(self, attempt: _Attempt) -> None:
        """A script that does not use our checkpoints is told as torchrun would tell it."""
        if self._job.script is not None and all(beat.phase is Phase.STARTING for beat in self._beats()):
            attempt.watch.kill(signal.SIGTERM)

    def _conclude(self, attempt: _Attempt) -> tuple[Failure, list[Any]]:
        assert self._agent is not None and attempt.result is not None
        beats = self._beats()
        step = max((beat.step for beat in beats), default=0)
        started_step = max((beat.start_step for beat in beats), default=0)
        if attempt.result.get("launcher_lost"):
            return Failure(FailureKind.LAUNCHER_LOST, "the launcher died", step=step), beats
        if not self._agent.alive:
            return Failure(FailureKind.AGENT_LOST, "the checkpoint agent died", step=step), beats
        if self._fenced is not None:
            return Failure(FailureKind.FENCED, self._fenced, step=step), beats
        if self._storage_failed and not attempt.result["finished"]:
            count, error = max(self._failed_saves.values())
            cause = f"{count} saves in a row failed (checkpoint.max_failed_saves), the last one: {error}"
            return Failure(FailureKind.STORAGE_FAILED, cause, step=step), beats
        if attempt.ended_on_request and not attempt.result["finished"]:
            return Failure(FailureKind.ENDED, "ended at once on request", step=step), beats
        failure = classify(
            attempt.watch.ends(attempt.result["failures"]),
            finished=attempt.result["finished"],
            started_step=started_step,
            step=step,
        )
        if failure.kind is FailureKind.LAUNCHER_LOST and attempt.result.get("error"):
            failure = Failure(FailureKind.LAUNCHER_LOST, attempt.result["error"], step=step)
        return failure, beats

    # -- the processes -------------------------------------------------------------------------------------------

    def _ensure_processes(self) -> None:
        """Have a living agent and a living launcher.

        Raises:
            LaunchError: one of them cannot be started.
            UsageError: processes and machines do not fit together.
        """
        if self._launcher is not None and not self._launcher.alive:
            self._selector.unregister(self._launcher.sock)
            self._launcher.close()
            self._launcher = None
            self._accelerators = None
        if self._launcher is None:
            self._launcher = LauncherLink(
                self._rank_environment(),
                self._directory.logs / "launcher.log",
                Path(tempfile.mkdtemp(dir=self._runtime)),
            )
            self._selector.register(self._launcher.sock, selectors.EVENT_READ, self._on_launcher)
        if self._agent is not None and not self._agent.alive:
            self._selector.unregister(self._agent.sock)
            self._agent.close()
            self._agent = None
        if self._agent is None:
            self._agent = AgentLink(
                self._config.checkpoint_location,
                self._run_id,
                local_tier=self._config.checkpoint.local_tier,
                local_keep_last=self._config.checkpoint.local_keep_last,
                commits=self._is_first_node,
                memory_limit=self._config.checkpoint.memory_limit_bytes,
                directory=Path(tempfile.mkdtemp(dir=self._runtime)),
                cancelled=lambda: self._stop_requested,
            )
            self._selector.register(self._agent.sock, selectors.EVENT_READ, self._on_agent)
        deadline = time.monotonic() + _LAUNCHER_TIMEOUT_S
        while self._accelerators is None and not self._stop_requested:
            self._pump(_TICK_S)
            if not self._launcher.alive:
                raise LaunchError(
                    f"the launcher ended with status {self._launcher.process.returncode} while it loaded torch; its "
                    "error is above"
                )
            if time.monotonic() > deadline:
                raise LaunchError(f"the launcher has not loaded torch within {_LAUNCHER_TIMEOUT_S:.0f} s")
        if not self._stop_requested:
            self._nnodes, self._nproc_per_node = self._shape()

    def _shape(self) -> tuple[int, int]:
        """Machines, and ranks on this one."""
        launch = self._config.launch
        nproc = (self._accelerators or 2) if launch.nproc_per_node == "auto" else launch.nproc_per_node
        nnodes = launch.nnodes
        if launch.world_size is not None and nnodes == 1:
            if launch.world_size % nproc:
                raise UsageError(
                    f"WORLD_SIZE={launch.world_size} is not a multiple of the {nproc} ranks on this machine; set "
                    "--nproc-per-node, or unset WORLD_SIZE"
                )
            nnodes = launch.world_size // nproc
        if launch.node_rank >= nnodes:
            raise UsageError(
                f"node rank {launch.node_rank} (--node-rank or RANK) needs more than {nnodes} machine(s) of {nproc} "
                "ranks; check --nnodes, WORLD_SIZE and --nproc-per-node"
            )
        return nnodes, nproc

    def _rank_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment[processes.RUN_ID_ENV] = processes.mark(self._run_id, self._config.launch.node_rank)
        # torchrun's own default: ranks share the cores. It has to be set before torch is loaded.
        if self._config.launch.nproc_per_node != 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        # The ranks get these from torchrun; inherited ones would only contradict it.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        return environment

    def _launch_request(self, attempt: int) -> Message:
        assert self._agent is not None
        launch = self._config.launch
        master = f"{launch.master_addr or 'localhost'}:{launch.master_port}"
        endpoint = launch.rdzv_endpoint or (master if self._nnodes > 1 else "localhost:0")
        return {
            "run_id": self._run_id,
            "attempt": attempt,
            "nnodes": self._nnodes,
            "nproc_per_node": self._nproc_per_node,
            "rdzv_endpoint": endpoint,
            "is_host": self._is_first_node,
            "cold": launch.cold,
            "show_output": self._job.script is not None,
            "log_dir": str(self._directory.logs / f"attempt-{attempt}"),
            "spec": {
                "env": {
                    SOCKET_ENV: self._agent.process.socket_path,
                    ATTEMPT_ENV: str(attempt),
                    LOCATION_ENV: self._config.checkpoint_location,
                    LOCAL_TIER_ENV: self._config.checkpoint.local_tier or "",
                    RESUME_ENV: "auto",
                    FAILURES_ENV: self._failure_history(),
                },
                "events": self._events.path,
                "config": str(self._directory.config),
                "cache": str(self._directory.cache),
                "script": self._job.script,
                "args": list(self._job.args),
            },
        }

    def _failure_history(self) -> str:
        """Failures and seconds of this run so far, by its journal."""
        run = summarise(read_journal(self._directory.journal), now=time.time())
        failures = sum(attempt.kind not in _NO_FAILURE for attempt in run.attempts)
        return f"{failures}:{run.wall_s - run.time_by_cause['down']:.0f}"

    def _strays(self) -> list[psutil.Process]:
        """Descendants that belong to no living helper: ranks, and what ranks have left."""
        keep = {link.pid for link in (self._agent, self._launcher) if link is not None}
        if self._launcher is not None and self._launcher.alive:
            # Fork server and resource tracker.
            with contextlib.suppress(psutil.Error):
                keep |= {child.pid for child in psutil.Process(self._launcher.pid).children() if _is_helper(child)}
        return [process for process in processes.descendants() if process.pid not in keep]

    def _end_attempt_at_agent(self) -> None:
        """Let it read what the dead ranks have left. What was whole is committed while the next attempt starts."""
        assert self._agent is not None
        self._attempt_over = False
        self._agent.tell("end_attempt")
        self._pump_until(lambda: self._attempt_over)

    def _pump_until(self, done: Callable[[], bool]) -> None:
        """Let the agent write; not for ever, and not once the user has asked twice to stop."""
        assert self._agent is not None
        deadline = time.monotonic() + _AGENT_TIMEOUT_S
        while self._agent.alive and not done():
            self._pump(_TICK_S)
            if self._num_signals > 1:
                deadline = min(deadline, time.monotonic() + _AGENT_HURRY_S)
            if time.monotonic() > deadline:
                self._agent.process.process.kill()
                break

    def _close(self) -> None:
        if self._launcher is not None:
            self._selector.unregister(self._launcher.sock)
            self._launcher.close()
        if self._agent is not None:
            self._agent.tell("shutdown")
            self._pump_until(lambda: False)
            self._agent.close()
        processes.kill_all(processes.descendants)
        self._events.close()
        self._selector.close()

    # -- events --------------------------------------------------------------------------------------------------

    def _pump(self, timeout_s: float) -> None:
        """Handle what has happened, waiting at most `timeout_s` for it."""
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)
        if self._stop_requested and not self._stop_announced:
            self._stop_announced = True
            self._record("stop_requested")
            self._display.message("stop requested: the ranks snapshot, commit and end; once more to end at once")
            self._states.move(RunState.STOPPING)
        self._show_heartbeat()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop_requested and (left := deadline - time.monotonic()) > 0:
            self._pump(min(left, _TICK_S))

    def _on_rank_events(self, _: Any) -> None:
        for message in self._events.receive():
            if self._attempt is None:
                continue
            watch = self._attempt.watch
            match message["event"]:
                case "rank_started":
                    self._record("rank_started", rank=message["rank"], pid=message["pid"])
                    pidfd = watch.started(message)
                    if pidfd is not None:
                        self._selector.register(pidfd, selectors.EVENT_READ, self._on_rank_death)
                case "rank_done":
                    watch.done.add(int(message["rank"]))
                case name:
                    self._record(name, **{key: value for key, value in message.items() if key != "event"})
                    self._show_training(message)

    def _on_rank_death(self, pidfd: int) -> None:
        # What it said before it died comes first.
        self._on_rank_events(None)
        if self._attempt is not None and pidfd in self._attempt.watch.pidfds:
            self._selector.unregister(pidfd)
            self._attempt.watch.died(pidfd)

    def _on_launcher(self, sock: Any) -> None:
        try:
            message, _ = protocol.receive(sock)
        except OSError:
            # It is dead; `alive` says so, and the socket must not wake the selector for ever.
            time.sleep(0.01)
            return
        if message["event"] == "ready":
            self._accelerators = int(message["accelerators"])
        elif self._attempt is not None:
            self._on_rank_events(None)
            self._attempt.result = message

    def _on_agent(self, sock: Any) -> None:
        try:
            message, _ = protocol.receive(sock)
        except OSError:
            time.sleep(0.01)
            return
        event = message.pop("event", None)
        if event == "attempt_over":
            self._attempt_over = True
        elif event == "transfer":
            self._display.state.show_transfer(message)
        elif event is not None and event != "attempt_begun":
            message.pop("attempt", None)
            self._record(event, **message)
            if event in ("committed", "commit_failed", "fetched", "fetch_failed"):
                self._display.state.transfer = ""
            if event == "committed":
                self._failed_saves.pop(message["tier"], None)
                self._committed_step = max(self._committed_step, message["step"])
                self._display.state.committed_step = message["step"]
            elif event == "commit_failed":
                count, _ = self._failed_saves.get(message["tier"], (0, ""))
                self._failed_saves[message["tier"]] = (count + 1, message["error"])
                self._display.message(f"checkpoint of step {message['step']} failed: {message['error']}")
            elif event == "tier_unreachable":
                self._display.message(f"the {message['tier']} checkpoints cannot be reached: {message['reason']}")
            elif event == "fetched":
                size, seconds = message["nbytes"] / 1e6, message["duration_s"]
                self._display.message(
                    f"read checkpoint-{message['step']} into memory: {size:,.1f} MB in {seconds:.1f} s"
                )
            elif event == "resumed":
                self._show_resumption(message)
            elif event == "fenced":
                self._fenced = message["reason"]
            elif event == "memory_short":
                self._display.message(f"memory for snapshots is short: {message['reason']}")
            elif event in ("snapshot_damaged", "snapshot_dropped") and message["reason"]:
                self._display.message(f"the snapshot of step {message['step']} is not used: {message['reason']}")
            elif event == "checkpoint_set_aside":
                self._display.message(
                    f"checkpoint-{message['step']} is not used: {message['reason']}; kept as {message['kept_as']}"
                )

    def _show_resumption(self, message: Message) -> None:
        state = self._display.state
        lost = state.step - message["step"]
        self._display.message(
            f"attempt {state.attempt} goes on from step {message['step']}"
            + f" ({'held in memory' if message['from'] == 'memory' else message['from'] + ' checkpoint'})"
            + (f", {lost} steps to compute again" if lost > 0 else "")
        )

    def _show_training(self, message: Message) -> None:
        state = self._display.state
        if message["event"] == "training_started":
            state.total_steps = message["total_steps"]
        elif message["event"] == "log":
            state.loss = message["loss"]
            state.tokens_per_s = message.get("tokens_per_s") or state.tokens_per_s

    def _show_heartbeat(self) -> None:
        beats = [beat for beat in self._beats() if beat.start_time]
        if beats:
            self._display.state.step = max(beat.step for beat in beats)
            self._display.state.activity = f"step {self._display.state.step}"
            if self._job.script is not None and self._attempt is not None and not self._attempt.announced:
                # The default job says this itself, with the number of steps to come.
                self._attempt.announced = True
                self._record("training_started", step=beats[0].start_step, total_steps=None)
        self._display.refresh()

    def _beats(self) -> list[Any]:
        if self._agent is None or self._attempt is None:
            return []
        return self._agent.heartbeats(self._nproc_per_node)

    def _record(self, event: str, **details: Any) -> None:
        self._journal.append(event, self._last_attempt, **details)

    # -- signals -------------------------------------------------------------------------------------------------

    @property
    def _stop_requested(self) -> bool:
        return self._num_signals > 0

    def _install_signal_handlers(self) -> None:
        def count(*_: object) -> None:
            self._num_signals += 1

        receiver, sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        self._selector.register(receiver, selectors.EVENT_READ, lambda fd: os.read(fd, 4096))
        for number in processes.STOP_SIGNALS:
            signal.signal(number, count)


def _is_helper(process: psutil.Process) -> bool:
    """The fork server or the resource tracker of `multiprocessing`, by its command line."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command


def check_storage(config: Config) -> list[str]:
    """Try what the run will need, before anything is started; returns what the user ought to know about the places.

    Raises:
        UsageError: one of them cannot be used; the text says why.
    """
    tiers, caveats = config.tiers, []
    for storage in tiers.nearest_first:
        try:
            caveats.append(storage.probe())
        except OSError as error:
            key = "checkpoint.location" if storage is tiers.durable else "checkpoint.local_tier"
            reason = error.strerror or str(error)
            raise UsageError(f"{key}={storage.location!r} cannot be used: {reason}") from None
    return [caveat for caveat in caveats if caveat is not None]


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
