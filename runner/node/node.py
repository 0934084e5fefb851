"""This machine's part of a run: the checkpoint agent, the launcher, and the ranks of one attempt after the other.

It starts them, watches them, ends them, and says how an attempt went. What follows from that is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from checkpointing.agent import protocol
from checkpointing.agent.client import ATTEMPT_ENV, SOCKET_ENV
from checkpointing.agent.protocol import Message
from checkpointing.environment import (
    ALLOW_CHANGES_ENV,
    BATCH_ENV,
    FAILURES_ENV,
    LINEAGE_ENV,
    LOCAL_TIER_ENV,
    LOCATION_ENV,
    RESUME_ENV,
    RESUME_FROM_ENV,
    SKIP_ENV,
)
from checkpointing.heartbeat import Heartbeat, Phase
from checkpointing.memory import oom_kills
from runner.config.environment import LOST_STEPS_ENV, TORCHRUN_VARIABLES
from runner.config.schema import Config
from runner.config.topology import shape_of
from runner.errors import GpuMissing, HelperKilled, LaunchError, UsageError
from runner.journal.journal import SteadyClock
from runner.journal.run_directory import RunDirectory
from runner.node.helpers import AgentLink, LauncherLink
from runner.node.messages import Job, Order, Outcome
from runner.node.output import OutputRelay
from runner.node.rank_watch import RankEvents, RankWatch
from runner.node.stacks import dump_stacks
from runner.node.watchdog import Hang, Limits, StoppedProcesses, Watchdog
from runner.recovery.classify import classify
from runner.recovery.kinds import Failure, FailureKind
from runner.system import processes
from runner.system.event_loop import EventLoop, StopRequest
from runner.ui.progress import ProgressDisplay

# While ranks train, everything that matters wakes the loop; this is for what only time tells.
_TURN_S = 0.5
_SOON_S = 0.05
# A rank that says only that another one is gone: time for that one to say why.
_CAUSE_GRACE_S = 0.5
# From the last rank's death to torchrun's word about it; longer where it waits for a machine that is gone.
_LAUNCHER_PATIENCE_S = 5.0
# Imports on a cold, slow disk.
_LAUNCHER_TIMEOUT_S = 600.0
# A commit to slow storage; what takes longer is a storage that hangs.
_AGENT_TIMEOUT_S = 600.0
# It says so while it gets nowhere, too.
_NO_PROGRESS = {"pong", "storage_retried", "note_failed"}
# The same, once the user has asked twice: a snapshot that is whole is worth a moment.
_AGENT_HURRY_S = 5.0
# The same where all ranks have ended well: machines wait for each other.
_LAUNCHER_END_PATIENCE_S = 60.0
# The agent answers at once; only when it allocates much memory it may take a while.
_PING_INTERVAL_S = 2.0
_PONG_TIMEOUT_S = 120.0
# Whoever was stopped himself for longer than this must not blame others for their silence.
_GAP_S = 3.0
_STATES_EVERY_S = 1.0
_PROGRESS_EVERY_S = 10.0
# Beside the ranks' numbers.
_AGENT, _LAUNCHER = -1, -2
# SIGKILL ends a process at once, unless the kernel holds it: a hung driver, a dead file server.
_KILL_TIMEOUT_S = 30.0

Record = Callable[..., None]


@dataclass
class _Attempt:
    """The attempt that is alive."""

    order: Order
    watchdog: Watchdog
    kernel_oom_kills: int
    stopped: StoppedProcesses = field(default_factory=StoppedProcesses)
    states_seen_at: float = 0.0
    watch: RankWatch = field(default_factory=RankWatch)
    result: Message | None = None
    kill_at: float | None = None
    failed_at: float = 0.0
    # Since when a word of the launcher's is due.
    quiet_since: float = field(default_factory=time.monotonic)
    stop_deadline: float | None = None
    # The newest step that the journal has been told of, and when.
    recorded_step: int = 0
    recorded_at: float = 0.0
    # Ranks that say that they were asked to stop.
    signalled: set[int] = field(default_factory=set)
    # Why it was ended from outside; goes before what its ranks then say.
    verdict: Failure | None = None
    # Where the ranks stand is to be written down before they are killed.
    stacks_wanted: bool = False
    # A script was told to stop as torchrun would tell it.
    script_told: bool = False
    # Shows what the ranks print.
    relay: OutputRelay | None = None

    @property
    def asked(self) -> set[int]:
        """Ranks that somebody has asked to stop. torchrun, too, ends the others with SIGTERM when one has died, be it
        after it was done: of what comes later, only the dead one's own word counts."""
        first = self.watch.deaths[:1]
        return self.signalled & set(first) if first else self.signalled


def promised_gpu(environment: Mapping[str, str], devices: Path) -> str | None:
    """What says that this machine or container has NVIDIA GPUs to use; None where nothing does.

    Args:
        devices: the folder of device files, `/dev`.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    nodes = sorted(path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if nodes:
        return f"there is {nodes[0]}"
    # Set by who starts the container, for the runtime that makes the devices.
    wanted = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return f"NVIDIA_VISIBLE_DEVICES={wanted}" if wanted not in ("", "none", "void") else None


def _on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Where the ranks of a single machine listen for each other, unless the user says so."""
    return {name: "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in environment}


class Node:
    """Attributes:
    committed_step: the newest that this machine's agent has committed or found; -1 before the first.
    batch: samples per micro-batch, and micro-batches per step, as the ranks have said; None before.
    fenced: why no attempt of ours may write any more.
    others_busy: on another machine a rank rightly does what is no step.
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
    ) -> None:
        """
        Args:
            run_id: the run's, equal on all machines.
            clock: the journal's.
            runtime: a folder for sockets; whoever made it removes it.
        """
        self._config, self._directory, self._job, self.run_id = config, directory, job, run_id
        self._display, self._record, self._clock, self._loop, self._stop = display, record, clock, loop, stop
        self._runtime = runtime
        self._mark = processes.mark(directory.run_id(), config.launch.node_rank)
        self.committed_step = -1
        self.batch: tuple[int, int] | None = None
        self.fenced: str | None = None
        self.others_busy = False
        self._heard_at = time.monotonic()
        # By tier: saves that it has refused since the last one that it took, and why the newest was.
        self._failed_saves: dict[str, tuple[int, str]] = {}
        # Seconds that the last commit has taken.
        self._commit_s: float | None = None
        self._attempt: _Attempt | None = None
        self._attempt_over = False
        self._agent: AgentLink | None = None
        self._launcher: LauncherLink | None = None
        self._accelerators: int | None = None
        self._torch_has_cuda = False
        # Ranks are fresh interpreters, not forks of a preloaded one.
        self._cold = config.launch.cold
        self._nproc = 1
        self._pinged_at = self._ponged_at = self._turned_at = time.monotonic()
        self._events = RankEvents(runtime)
        loop.register(self._events.sock, lambda _: self._on_rank_events())

    # -- the processes -------------------------------------------------------------------------------------------

    def ensure_processes(self) -> None:
        """Have a living agent and a living launcher; returns early if a stop is asked for.

        Raises:
            LaunchError: one of them cannot be started; HelperKilled: it was killed meanwhile.
        """
        self._drop_dead_helpers()
        if self._launcher is None:
            temporary = Path(tempfile.mkdtemp(dir=self._runtime))
            self._launcher = LauncherLink(self._rank_environment(), self._directory.logs / "launcher.log", temporary)
            self._loop.register(self._launcher.sock, self._on_launcher)
        if self._agent is None:
            checkpoint = self._config.checkpoint
            self._agent = AgentLink(
                self._config.checkpoint_location,
                self.run_id,
                local_tier=checkpoint.local_tier,
                local_keep_last=checkpoint.local_keep_last,
                commits=self._config.launch.node_rank == 0,
                memory_limit=checkpoint.memory_limit_bytes,
                directory=Path(tempfile.mkdtemp(dir=self._runtime)),
                cancelled=self._cancelled,
            )
            self._loop.register(self._agent.sock, self._on_agent)
            self._ponged_at = time.monotonic()
        deadline = time.monotonic() + _LAUNCHER_TIMEOUT_S
        while self._accelerators is None and not self._stop:
            self._loop.pump(_SOON_S)
            if not self._launcher.alive:
                status = self._launcher.process.returncode
                if status < 0:
                    raise HelperKilled(f"the launcher was killed by signal {-status} while it loaded torch")
                raise LaunchError(f"the launcher ended with status {status} while it loaded torch; its error is above")
            if time.monotonic() > deadline:
                raise LaunchError(f"the launcher has not loaded torch within {_LAUNCHER_TIMEOUT_S:.0f} s")

    def _cancelled(self) -> bool:
        """While the agent starts, the loop goes on: others want signs of life."""
        self._loop.pump(0.0)
        return bool(self._stop)

    def _drop_dead_helpers(self) -> None:
        if self._launcher is not None and not self._launcher.alive:
            self._loop.unregister(self._launcher.sock)
            self._launcher.close()
            self._launcher = self._accelerators = None
        if self._agent is not None and not self._agent.alive:
            self._loop.unregister(self._agent.sock)
            self._agent.close()
            self._agent = None

    @property
    def shape(self) -> tuple[int, int]:
        """Machines, and ranks on this one; once the processes are there.

        Raises:
            UsageError: processes and machines do not fit together. GpuMissing: the GPUs of this one cannot be used.
        """
        assert self._accelerators is not None
        if not self._accelerators and self._torch_has_cuda and self._config.trainer.get("use_cpu") is not True:
            promised = promised_gpu(os.environ, Path("/dev"))
            if promised:
                raise GpuMissing(
                    f"{promised}, but torch finds no GPU: the driver is missing, too old for this torch, or has lost "
                    "them (nvidia-smi). To train on the CPU: --set trainer.use_cpu=true, or CUDA_VISIBLE_DEVICES=-1"
                )
        return shape_of(self._config, self._accelerators)

    @property
    def agent_pid(self) -> int:
        """0 where there is no agent."""
        return self._agent.pid if self._agent is not None and self._agent.alive else 0

    def note(self, text: str) -> bool:
        """Have it kept beside the checkpoints; False where there is no agent to do it."""
        return self._tell_agent("note", text=text)

    def keep_file(self, name: str, path: Path, start: int, end: int) -> bool:
        """Have these bytes of a file kept beside the checkpoints; False where there is no agent to do it."""
        return self._tell_agent("record", name=name, path=str(path), start=start, end=end)

    def _tell_agent(self, do: str, **details: Any) -> bool:
        if self._agent is None or not self._agent.alive:
            return False
        self._agent.tell(do, **details)
        return True

    @property
    def busy(self) -> bool:
        """A rank of this machine rightly does what is no step."""
        return self._attempt is not None and self._attempt.watchdog.busy

    def close(self) -> bool:
        """End everything, once what was snapshotted is committed; returns whether all of it is."""
        drained = True
        self._loop.unregister(self._events.sock)
        if self._launcher is not None:
            self._loop.unregister(self._launcher.sock)
            self._launcher.close()
        if self._agent is not None:
            self._agent.tell("shutdown")
            drained = self._let_agent_work(lambda: False)
            self._loop.unregister(self._agent.sock)
            self._agent.close()
        self._launcher = self._agent = None
        processes.kill_all(processes.descendants)
        self._events.close()
        return drained

    def _rank_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment[processes.RUN_ID_ENV] = self._mark
        # torchrun's own default: ranks share the cores. It has to be set before torch is loaded.
        if self._config.launch.nproc_per_node != 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        # The ranks get these from torchrun; inherited ones would only contradict it.
        for name in TORCHRUN_VARIABLES:
            environment.pop(name, None)
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Libraries ask when they are imported whether there is a GPU, in the process that ranks are forked from. Asked
        # of the driver's monitor, that leaves CUDA alone; else no rank could start it.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # Counting downloads is not for every restart.
        environment.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
        return environment

    # -- one attempt ---------------------------------------------------------------------------------------------

    def run_attempt(self, order: Order, each_turn: Callable[[], None] = lambda: None) -> Outcome:
        """Run an attempt to its end; returns how it went. No process of it is left.

        Args:
            each_turn: called about twice a second and after every event; may call `request_stop` and `end_attempt`.
        """
        assert self._agent is not None and self._launcher is not None
        attempt = self._attempt = self._begin(order)
        while attempt.result is None:
            self._loop.pump(_SOON_S if attempt.kill_at is not None else _TURN_S)
            each_turn()
            self._watch(attempt)
            self._show_heartbeat()
        self._show_heartbeat()
        attempt.watch.kill()
        for pidfd in list(attempt.watch.pidfds):
            self._loop.unregister(pidfd)
        attempt.watch.close()
        processes.kill_all(self._strays)
        processes.reap_strays({self._agent.pid, self._launcher.pid})
        if attempt.relay is not None:
            attempt.relay.finish()
        self._attempt_over = False
        self._agent.tell("end_attempt")
        self._let_agent_work(lambda: self._attempt_over)
        outcome = self._conclude(attempt)
        self._attempt = None
        return outcome

    def request_stop(self) -> None:
        """Have the ranks agree on a step, snapshot it, commit and end; they get the grace period for it."""
        attempt = self._attempt
        if attempt is None or attempt.stop_deadline is not None:
            return
        assert self._agent is not None
        grace_s = self._config.restart.grace_s
        attempt.stop_deadline = time.monotonic() + grace_s
        self._agent.tell("request_stop")
        if self._commit_s is not None and self._commit_s > grace_s:
            self._display.message(
                f"the last commit took {self._commit_s:.0f} s, and there are {grace_s:g} s for the next: it may not "
                f"fit; step {self.committed_step} is safe. A longer --grace or a checkpoint.local_tier gives it room"
            )
        # A script that does not use our checkpoints is told as torchrun would tell it.
        if self._job.script is not None and all(beat.phase is Phase.STARTING for beat in self._beats()):
            attempt.script_told = True
            attempt.watch.kill(signal.SIGTERM)

    def end_attempt(self, verdict: Failure, *, stacks: bool = False) -> None:
        """Kill the ranks: the attempt is over, for this reason.

        Args:
            stacks: write down where they stand before.
        """
        attempt, now = self._attempt, time.monotonic()
        if attempt is None or attempt.verdict is not None:
            return
        if attempt.kill_at is None or attempt.kill_at > now:
            attempt.kill_at, attempt.stacks_wanted = now, stacks
        # A rank of ours that has failed before is a better answer than that others were told to end.
        if verdict.kind is not FailureKind.ENDED or not attempt.watch.failures:
            attempt.verdict = verdict

    def _begin(self, order: Order) -> _Attempt:
        assert self._agent is not None and self._launcher is not None
        restart, now = self._config.restart, time.monotonic()
        nnodes, self._nproc = self.shape
        if nnodes != order.nnodes:
            raise UsageError(
                f"this machine was started for {nnodes} machine(s), the first one for {order.nnodes}: give the same "
                "--nnodes everywhere"
            )
        limits = Limits(restart.hang_timeout_s, restart.first_step_timeout_s, restart.quiet_timeout_s)
        attempt = _Attempt(order, Watchdog(limits, watch_start=self._job.script is None, now=now), oom_kills())
        if self._job.show_output:
            attempt.relay = OutputRelay(self._display.pass_on)
        self._turned_at = self._ponged_at = now
        # It may not come so far as to say.
        self.batch = None
        self._display.state.attempt = order.attempt
        self._display.state.activity = "starting"
        self._agent.tell("begin_attempt", attempt=order.attempt, fetch=True)
        self._record("attempt_started", nnodes=nnodes, launcher_pid=self._launcher.pid, agent_pid=self._agent.pid)
        self._launcher.send(self._launch_request(order, nnodes))
        return attempt

    def _launch_request(self, order: Order, nnodes: int) -> Message:
        assert self._agent is not None
        launch = self._config.launch
        resume_from = self._job.resume_from or order.resume_from
        allow_changes = self._job.allow_changes or order.allow_changes
        endpoint, own = launch.rendezvous(nnodes)
        return {
            "run_id": self.run_id,
            "attempt": order.attempt,
            "nnodes": nnodes,
            "nproc_per_node": self._nproc,
            "rdzv_endpoint": endpoint,
            "is_host": launch.node_rank == 0,
            "local_addr": own,
            "join_timeout_s": launch.rendezvous_timeout_s,
            "cold": self._cold,
            "log_dir": str(self._log_dir(order.attempt)),
            "spec": {
                "env": {
                    **(_on_loopback(os.environ) if nnodes == 1 else {}),
                    SOCKET_ENV: self._agent.process.socket_path,
                    ATTEMPT_ENV: str(order.attempt),
                    LOCATION_ENV: self._config.checkpoint_location,
                    LOCAL_TIER_ENV: self._config.checkpoint.local_tier or "",
                    RESUME_ENV: "auto",
                    FAILURES_ENV: order.failure_history,
                    LINEAGE_ENV: order.lineage,
                    LOST_STEPS_ENV: f"{order.lost_steps}:{order.reached}",
                    BATCH_ENV: str(order.divisor),
                    SKIP_ENV: order.skipped,
                    **({RESUME_FROM_ENV: resume_from} if resume_from else {}),
                    **({ALLOW_CHANGES_ENV: "1"} if allow_changes else {}),
                },
                "events": self._events.path,
                "config": str(self._directory.config),
                "cache": str(self._directory.cache),
                "accelerators": self._accelerators or 0,
                # Not what a stock Trainer wrote: it need not hold every weight.
                "resumes": (order.attempt > 1 or self.committed_step >= 0) and not resume_from,
                "script": self._job.script,
                "args": list(self._job.args),
            },
        }

    def _log_dir(self, attempt: int) -> Path:
        return self._directory.logs / f"attempt-{attempt}"

    def _watch(self, attempt: _Attempt) -> None:
        """What needs an answer while the ranks run: a death, a hang, a lost helper process, a stop request."""
        assert self._agent is not None and self._launcher is not None
        now = time.monotonic()
        gap = self._turn(now)
        attempt.quiet_since += gap
        if attempt.signalled and not self._stop:
            # A death before it is to be known.
            self._loop.pump(0.0)
            if attempt.asked and attempt.verdict is None:
                self._stop.ask(f"a signal to rank {min(attempt.asked)}")
        if attempt.watch.failures and attempt.kill_at is None:
            attempt.kill_at = now if attempt.watch.cause_known else now + _CAUSE_GRACE_S
        self._check_agent(attempt, now)
        if not self._launcher.alive:
            # The fork server ends with it and takes the ranks along; the sweep gets what is left.
            attempt.result = attempt.result or {"finished": False, "failures": [], "launcher_lost": True}
        if self._stop or self._storage_failed:
            self.request_stop()
            late = attempt.stop_deadline is not None and now > attempt.stop_deadline
            if self._stop.at_once or late or not self._may_stop_in_order(attempt):
                self.end_attempt(Failure(FailureKind.ENDED, "ended at once on request"))
        if attempt.kill_at is None:
            self._check_hang(attempt, now)
        if not attempt.failed_at and (attempt.kill_at is not None or not self._launcher.alive):
            attempt.failed_at = round(self._clock(), 3)
        if attempt.kill_at is not None and now >= attempt.kill_at:
            if attempt.stacks_wanted:
                attempt.stacks_wanted = False
                self._write_stacks(attempt)
            attempt.watch.kill()
            if attempt.watch.pidfds and now > attempt.kill_at + _KILL_TIMEOUT_S and attempt.result is None:
                stuck = ", ".join(str(rank) for rank in sorted(attempt.watch.pidfds.values()))
                cause = f"rank {stuck} does not end by SIGKILL: the kernel holds it (a driver, a file server)"
                attempt.verdict = Failure(FailureKind.BAD_NODE, cause)
                attempt.result = {"finished": False, "failures": []}
            if not attempt.watch.pidfds:
                # Ranks that are forked but have not introduced themselves yet.
                processes.kill_all(self._strays, timeout_s=0.2)
        self._check_launcher(attempt, now)

    def _turn(self, now: float) -> float:
        """Seconds for which this process was stopped since the last turn: for those nobody else is to blame."""
        gap, self._turned_at = now - self._turned_at, now
        gap = gap if gap > _GAP_S else 0.0
        self._ponged_at += gap
        return gap

    def _ping_agent(self, now: float) -> None:
        """See that it answers; one that does not is killed."""
        assert self._agent is not None
        if now - self._pinged_at >= _PING_INTERVAL_S:
            self._pinged_at = now
            self._agent.tell("ping")
        patience = min(_PONG_TIMEOUT_S, self._config.restart.quiet_timeout_s)
        if now - self._ponged_at > patience and self._agent.alive:
            self._agent.process.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.process.process.wait(_KILL_TIMEOUT_S)

    def _check_agent(self, attempt: _Attempt, now: float) -> None:
        assert self._agent is not None
        self._ping_agent(now)
        if not self._agent.alive:
            self.end_attempt(Failure(FailureKind.AGENT_LOST, "the checkpoint agent died, or answered no more"))
        elif self.fenced is not None:
            self.end_attempt(Failure(FailureKind.FENCED, self.fenced))

    def _check_hang(self, attempt: _Attempt, now: float) -> None:
        watch, stopped = attempt.watch, self._stopped(attempt, now)
        if _AGENT in stopped or _LAUNCHER in stopped:
            # Ranks that wait for it are not to blame.
            self._end_stopped_helper(_AGENT if _AGENT in stopped else _LAUNCHER)
            return
        rank_of = {local: rank for rank, local in watch.local_ranks.items()}
        hang = attempt.watchdog.look(self._beats(), now, others_busy=self.others_busy)
        if hang is None and stopped:
            hang = Hang(tuple(watch.local_ranks[rank] for rank in stopped), "somebody has stopped it (SIGSTOP)")
        if hang is None or attempt.result is not None:
            return
        ranks = [rank_of[slot] for slot in hang.slots if slot in rank_of]
        names = f"rank {', '.join(map(str, ranks))}" if ranks else "the ranks"
        self._display.message(f"{names}: {hang.reason}; writing down where all ranks stand")
        files = self._write_stacks(attempt)
        self._record("hang", ranks=ranks, reason=hang.reason, stacks=[str(file) for file in files])
        where = f"; stacks: {files[0].parent}/stacks-*.txt" if files else ""
        rank = ranks[0] if ranks else None
        self.end_attempt(Failure(FailureKind.HUNG, f"{names} hung: {hang.reason}{where}", rank))

    def _stopped(self, attempt: _Attempt, now: float) -> list[int]:
        """Ranks and helpers that somebody has stopped; looked for about once a second."""
        assert self._agent is not None and self._launcher is not None
        if now - attempt.states_seen_at < _STATES_EVERY_S:
            return []
        attempt.states_seen_at = now
        pids = {rank: attempt.watch.pids[rank] for rank in attempt.watch.pidfds.values()}
        pids |= {_AGENT: self._agent.pid, _LAUNCHER: self._launcher.pid}
        return attempt.stopped.look({name: processes.state(pid) for name, pid in pids.items()}, now)

    def _end_stopped_helper(self, name: int) -> None:
        assert self._agent is not None and self._launcher is not None
        helper, what, kind = {
            _AGENT: (self._agent.process.process, "checkpoint agent", FailureKind.AGENT_LOST),
            _LAUNCHER: (self._launcher.process, "launcher", FailureKind.LAUNCHER_LOST),
        }[name]
        helper.kill()
        self.end_attempt(Failure(kind, f"somebody has stopped the {what} (SIGSTOP to pid {helper.pid}); it was killed"))

    def _write_stacks(self, attempt: _Attempt) -> list[Path]:
        pids = {f"rank{rank}": pid for rank, pid in sorted(attempt.watch.pids.items())}
        return dump_stacks(pids, self._log_dir(attempt.order.attempt), lambda: self._loop.pump(_SOON_S))

    def _check_launcher(self, attempt: _Attempt, now: float) -> None:
        """torchrun speaks once all ranks are gone; one that waits for a machine that is not there is not waited for."""
        assert self._launcher is not None
        watch, ended = attempt.watch, attempt.kill_at is not None and now >= attempt.kill_at
        finished = not watch.pidfds and len(watch.done) == self._nproc
        over = ended or (not watch.pidfds and len(watch.deaths) >= self._nproc)
        if not watch.pids and not ended:
            # It has yet to fork the first rank, or waits for the other machines.
            patience = self._config.restart.quiet_timeout_s
            cause = f"no rank was started within {patience:g} s (restart.quiet_timeout_s); the launcher was killed"
        else:
            cause = "the launcher did not end with its ranks, and was killed"
            patience = _LAUNCHER_PATIENCE_S if ended else _LAUNCHER_END_PATIENCE_S
            if watch.pidfds or not over:
                attempt.quiet_since = now
        if now - attempt.quiet_since > patience and attempt.result is None:
            self._launcher.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.process.wait(_KILL_TIMEOUT_S)
            attempt.result = {"finished": finished, "failures": [], "launcher_lost": not over}
            if not over and attempt.verdict is None:
                attempt.verdict = Failure(FailureKind.LAUNCHER_LOST, cause)

    @property
    def _storage_failed(self) -> bool:
        limit = self._config.checkpoint.max_failed_saves
        return limit is not None and any(count >= limit for count, _ in self._failed_saves.values())

    def _may_stop_in_order(self, attempt: _Attempt) -> bool:
        """Whether waiting can save anything: a training loop is there, or a script that may have its own answer."""
        if any(beat.phase not in (Phase.STARTING, Phase.RESTORING) for beat in self._beats()):
            return True
        return self._job.script is not None and bool(attempt.watch.pidfds)

    def _conclude(self, attempt: _Attempt) -> Outcome:
        assert attempt.result is not None
        beats = self._beats()
        start_step = max((beat.start_step for beat in beats), default=0)
        step = max((beat.step for beat in beats), default=0)
        failure = self._failure(attempt, start_step, step)
        if self._cold:
            # A fork is not what it failed by.
            failure = replace(failure, may_pass=failure.may_pass and not failure.in_fork, in_fork=False)
        elif failure.in_fork:
            self._cold = True
            self._record("cold_start", reason=failure.cause)
            self._display.message(
                "something that is imported before the ranks are forked has started the GPU's driver, so that no fork "
                "can use it: from now on ranks start as fresh interpreters, some seconds slower (with --cold, from the "
                "beginning)"
            )
        return Outcome(
            replace(failure, step=step),
            start_step,
            self._told(max((beat.start_time for beat in beats), default=0.0)),
            self._told(max((beat.time for beat in beats if beat.start_time), default=0.0)),
            attempt.failed_at,
            attempt.watch.log(failure.rank),
            any(beat.phase is not Phase.STARTING for beat in beats),
        )

    def _told(self, machine_time: float) -> float:
        return round(self._clock.at(machine_time), 3) if machine_time else 0.0

    def _failure(self, attempt: _Attempt, start_step: int, step: int) -> Failure:
        assert attempt.result is not None
        if self._storage_failed and not attempt.result["finished"]:
            count, error = max(self._failed_saves.values())
            cause = f"{count} saves in a row failed (checkpoint.max_failed_saves), the last one: {error}"
            return Failure(FailureKind.STORAGE_FAILED, cause)
        if attempt.verdict is not None and not attempt.result["finished"]:
            return attempt.verdict
        if attempt.script_told and attempt.result["finished"]:
            # It has answered the signal in its own way, which is no end of training.
            return Failure(FailureKind.PREEMPTED, "the script has ended in answer to SIGTERM")
        if attempt.result.get("launcher_lost"):
            return Failure(FailureKind.LAUNCHER_LOST, "the launcher died")
        failure = classify(
            attempt.watch.ends(attempt.result["failures"]),
            finished=attempt.result["finished"],
            started_step=start_step,
            step=step,
            kernel_oom_kills=oom_kills() - attempt.kernel_oom_kills,
        )
        # Of several machines, another one may have been asked.
        unasked = self._config.launch.nnodes == 1 and not self._stop and attempt.stop_deadline is None
        if failure.kind is FailureKind.PREEMPTED and unasked and not attempt.asked:
            cause = "the script has ended with status 75, which means a stop request to the runner; nobody has made one"
            return Failure(FailureKind.CRASHED, cause, step=step, fingerprint="status 75")
        if failure.kind is FailureKind.LAUNCHER_LOST and attempt.result.get("error"):
            failure = Failure(FailureKind.LAUNCHER_LOST, attempt.result["error"])
        return failure

    def _strays(self) -> list[psutil.Process]:
        """Descendants that belong to no living helper: ranks, and what ranks have left."""
        keep = {link.pid for link in (self._agent, self._launcher) if link is not None}
        if self._launcher is not None and self._launcher.alive:
            # Fork server and resource tracker.
            with contextlib.suppress(psutil.Error):
                keep |= {
                    child.pid
                    for child in psutil.Process(self._launcher.pid).children()
                    if processes.is_fork_server(child) or processes.is_tracker(child)
                }
        return [process for process in processes.descendants() if process.pid not in keep]

    def _let_agent_work(self, done: Callable[[], bool]) -> bool:
        """Until it has done what was asked for, or has ended by itself; returns whether.

        Not for ever without progress, and not for more than _AGENT_HURRY_S beyond the grace of a stop.
        """
        assert self._agent is not None
        # It may not have been asked for a while.
        self._ponged_at = self._turned_at = self._heard_at = began = time.monotonic()
        while self._agent.alive and not done():
            self._loop.pump(_SOON_S)
            now = time.monotonic()
            self._turn(now)
            self._ping_agent(now)
            deadline = self._heard_at + _AGENT_TIMEOUT_S
            if self._stop:
                over_at = self._stop.over_at(self._config.restart.grace_s)
                deadline = min(deadline, max(over_at, min(began, over_at) + _AGENT_HURRY_S))
            if now > deadline:
                self._agent.process.process.kill()
                self._record("agent_ended_early", waited_s=round(now - began, 1))
                self._display.message(
                    f"the checkpoint agent was ended after {now - began:.0f} s: what it was writing is not committed"
                )
                return False
        return done() or self._agent.process.process.returncode == 0

    # -- events --------------------------------------------------------------------------------------------------

    def _on_rank_events(self) -> None:
        for message in self._events.receive():
            # What an earlier attempt's ranks have left unread is over.
            if self._attempt is None or message["in_attempt"] != self._attempt.order.attempt:
                continue
            watch = self._attempt.watch
            match message["event"]:
                case "rank_started":
                    self._record("rank_started", rank=message["rank"], pid=message["pid"])
                    if self._attempt.relay is not None and message["error_file"]:
                        self._attempt.relay.follow(Path(message["error_file"]).parent)
                    pidfd = watch.started(message)
                    if pidfd is not None:
                        self._loop.register(pidfd, self._on_rank_death)
                case "rank_done":
                    watch.done.add(message["rank"])
                case "rank_preempted":
                    watch.preempted.add(message["rank"])
                case "rank_failed":
                    watch.errors[message["rank"]] = (message["error"], message["frame"], message["transient"])
                case "stop_signal":
                    self._attempt.signalled.add(message["rank"])
                case "best_model":
                    self._record("best_model", step=message["step"])

    def take_in(self, event: str, details: Message) -> None:
        """Show what rank 0 or an agent of another machine has said, as if it had been said here."""
        if event == "batch_shape":
            self.batch = (int(details["micro_batch"]), int(details["accumulation"]))
            return
        self._record(event, **details)
        if event == "resumed":
            self._show_resumption(details)
        else:
            self._show_training({"event": event, **details})

    def _on_rank_death(self, pidfd: int) -> None:
        # What it said before it died comes first.
        self._on_rank_events()
        if self._attempt is not None and pidfd in self._attempt.watch.pidfds:
            self._loop.unregister(pidfd)
            self._attempt.watch.died(pidfd)

    def _on_launcher(self, sock: Any) -> None:
        try:
            message, _ = protocol.receive(sock)
        except OSError:
            # It is dead; `alive` says so, and the socket must not wake the loop for ever.
            self._loop.unregister(sock)
            return
        if message["event"] == "ready":
            self._accelerators, self._torch_has_cuda = int(message["accelerators"]), bool(message["cuda"])
        elif self._attempt is not None:
            self._on_rank_events()
            self._attempt.result = message

    def _on_agent(self, sock: Any) -> None:
        try:
            message, _ = protocol.receive(sock)
        except OSError:
            self._loop.unregister(sock)
            return
        event = message.pop("event", None)
        if event not in _NO_PROGRESS:
            self._heard_at = time.monotonic()
        match event:
            case "attempt_over":
                self._attempt_over = True
            case "pong":
                self._ponged_at = time.monotonic()
            case "transfer":
                self._display.state.show_transfer(message)
            case "batch_shape":
                self.batch = (int(message["micro_batch"]), int(message["accumulation"]))
                self._record(event, **message)
            case None | "attempt_begun":
                pass
            case _:
                message.pop("attempt", None)
                self._record(event, **message)
                self._act_on(event, message)
                self._show_training({"event": event, **message})

    def _act_on(self, event: str, message: Message) -> None:
        """What an event of the agent's means to us, and to the user."""
        say = self._display.message
        if event in ("committed", "commit_failed", "fetched", "fetch_failed"):
            self._display.state.transfer = ""
        match event:
            case "committed":
                self._failed_saves.pop(message["tier"], None)
                self._commit_s = message.get("duration_s")
                # Of a further stage, counted over all of them.
                self.committed_step = max(self.committed_step, int(message.get("run_step") or message["step"]))
                self._display.state.committed_step = message["step"]
            case "stage":
                say(f"stage {message['number']} of the script begins: its checkpoints are in {message['stage']}")
            case "commit_failed":
                count, _ = self._failed_saves.get(message["tier"], (0, ""))
                self._failed_saves[message["tier"]] = (count + 1, message["error"])
                say(f"checkpoint of step {message['step']} failed: {message['error']}")
            case "tier_unreachable":
                say(f"the {message['tier']} checkpoints cannot be reached: {message['reason']}")
            case "storage_retried":
                last = f"the last for: {message['reason']}"
                say(f"calls to the {message['tier']} checkpoints that were tried again: {message['count']}, {last}")
            case "fetched":
                size, seconds = message["nbytes"] / 1e6, message["duration_s"]
                say(f"read checkpoint-{message['step']} into memory: {size:,.1f} MB in {seconds:.1f} s")
            case "resumed":
                self._show_resumption(message)
            case "fenced":
                self.fenced = message["reason"]
            case "memory_short":
                say(f"memory for snapshots is short: {message['reason']}")
            case "snapshot_damaged" | "snapshot_dropped" if message["reason"]:
                say(f"the snapshot of step {message['step']} is not used: {message['reason']}")
            case "checkpoint_set_aside":
                say(f"checkpoint-{message['step']} is not used: {message['reason']}; kept as {message['kept_as']}")

    # -- what the user sees --------------------------------------------------------------------------------------

    def _show_resumption(self, message: Message) -> None:
        state = self._display.state
        lost = state.step - message["step"]
        self._display.message(
            f"attempt {state.attempt} goes on from step {message['step']}"
            + f" ({'held in memory' if message['from'] == 'memory' else message['from'] + ' checkpoint'})"
            + (f", {lost} steps to compute again" if lost > 0 else "")
        )
        state.step = message["step"]

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
            self._record_progress(beats)
        self._display.refresh()

    def _record_progress(self, beats: list[Heartbeat]) -> None:
        """Of scripts that log no loss, or seldom: status elsewhere knows the journal alone."""
        attempt, now, step = self._attempt, time.monotonic(), self._display.state.step
        if attempt is None or step == attempt.recorded_step or now - attempt.recorded_at < _PROGRESS_EVERY_S:
            return
        attempt.recorded_step, attempt.recorded_at = step, now
        self._record("progress", step=step)

    def _beats(self) -> list[Heartbeat]:
        if self._agent is None or self._attempt is None:
            return []
        return self._agent.heartbeats(self._nproc)
