"""One attempt on this node while it runs: it watches ranks and helpers, handles stop requests and ends what hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkpointing.agent.protocol import Message
from checkpointing.host.heartbeat import Heartbeat, Phase, machine_clock
from runner.config.schema import Config
from runner.journal.attempts import AttemptResult, AttemptSpec, Job
from runner.journal.events import BestModel, NothingSaved, RankStarted, Record
from runner.node.agent_events import AgentEvents
from runner.node.attempt_end import GracefulStop, failure_of, storage_failed
from runner.node.hang_check import HangCheck, LauncherCheck, dump_stacks
from runner.node.helper_processes import KILL_TIMEOUT_S, LauncherHelper
from runner.node.helpers import Helpers
from runner.ranks.output import OutputRelay
from runner.ranks.watch import (
    BestModelWritten,
    Done,
    Failed,
    PreemptedRank,
    ProgramCheckpoint,
    ProgramSteps,
    RankMessage,
    RankWatch,
    Started,
    StopSignal,
    UnprotectedProgram,
    Working,
)
from runner.ranks.watchdog import Watchdog
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.event_loop import EventLoop, StopRequest
from runner.system.processes import Host
from runner.ui.progress import ProgressDisplay

_SOON_S = 0.05
# If a rank reports only that another one is gone: seconds for that one to report why.
_CAUSE_GRACE_S = 0.5
# Snapshots that change in a node's memory before it counts as faulty.
_MOST_DAMAGED = 2


class Attempt:
    """Watches an attempt until the launcher has reported its end.

    Attributes:
        spec: What was asked for.
        ranks: The ranks of this node.
        graceful: Has the ranks stop at an agreed step.
        hangs: Looks for ranks and helpers that hang.
        result: The launcher's last message; None while the attempt runs.
        failed_at: First sign of a failure, seconds since the epoch; 0 if there was none.
    """

    def __init__(
        self,
        spec: AttemptSpec,
        *,
        config: Config,
        job: Job,
        nproc: int,
        log_dir: Path,
        helpers: Helpers,
        checkpoints: AgentEvents,
        display: ProgressDisplay,
        record: Record,
        clock: Callable[[], float],
        loop: EventLoop,
        stop: StopRequest,
        host: Host,
        read_rank_messages: Callable[[], None],
        ranks: RankWatch | None = None,
    ) -> None:
        """Begin to watch; no rank has started.

        `clock` is the journal's, in seconds since the epoch; `read_rank_messages` has everything handled that ranks
        have sent so far.
        """
        self.spec, self._config, self._job, self._nproc, self._log_dir = spec, config, job, nproc, log_dir
        self._helpers, self._checkpoints, self._display, self._record = helpers, checkpoints, display, record
        self._clock, self._loop, self._stop, self._host = clock, loop, stop, host
        self._read_rank_messages = read_rank_messages
        now = host.monotonic()
        self._oom_kills_before = host.oom_kills()
        self.ranks = ranks if ranks is not None else RankWatch()
        self.result: Message | None = None
        self.failed_at = 0.0
        self._kill_at: float | None = None
        # Why this runner ended the attempt; it takes precedence over what its ranks then report.
        self._verdict: Failure | None = None
        # Whether to write the ranks' stacks before they are killed.
        self._stacks_wanted = False
        self._launcher_check = LauncherCheck(self.ranks, nproc, config.restart.quiet_timeout_s, now)
        self.graceful = GracefulStop(
            job,
            config.restart.grace_s,
            ranks=self.ranks,
            helpers=helpers,
            checkpoints=checkpoints,
            display=display,
            host=host,
            heartbeats=self.heartbeats,
        )
        # When an optimizer of a program took its first step, by `machine_clock`; 0 before that.
        self._stepped_at = 0.0
        self._relay = OutputRelay(display.pass_on) if job.show_output else None
        self.hangs = HangCheck(
            Watchdog(config.restart, watch_start=job.program is None, now=now),
            ranks=self.ranks,
            helpers=helpers,
            display=display,
            record=record,
            host=host,
            write_stacks=self._write_stacks,
        )

    # -- what ranks, launcher and supervisor report --------------------------------------------------------------------

    def on_rank(self, message: RankMessage) -> None:  # noqa: C901 - A table of messages.
        """Handle a message of a rank of this attempt."""
        match message:
            case Started():
                self._record(RankStarted(rank=message.rank, pid=message.pid))
                if self._job.program is not None:
                    self._display.state.activity = f"{self._job.program.label} runs, and has taken no step yet"
                if self._relay is not None and message.error_file:
                    self._relay.follow(Path(message.error_file).parent)
                pidfd = self.ranks.started(message)
                if pidfd is not None:
                    self._loop.register(pidfd, self._on_death)
            case Done(rank=rank):
                self.ranks.done.add(rank)
            case PreemptedRank(rank=rank):
                self.ranks.preempted.add(rank)
            case Failed(rank=rank):
                self.ranks.errors[rank] = (message.error, message.frame, message.transient)
            case StopSignal(rank=rank):
                self.graceful.signalled.add(rank)
            case UnprotectedProgram(reason=reason):
                found = NothingSaved(reason=reason)
                self._record(found)
                self._display.message(found.describe())
            case Working():
                self._display.state.activity = message.what
            case ProgramSteps():
                self._display.state.trains = True
                self._stepped_at = self._stepped_at or machine_clock()
            case ProgramCheckpoint(report=report):
                self._checkpoints.handle_program(report)
            case BestModelWritten(step=step):
                self._record(BestModel(step=step))

    def _on_death(self, pidfd: int) -> None:
        # What the rank reported before it died comes first.
        self._read_rank_messages()
        if pidfd in self.ranks.pidfds:
            self._loop.unregister(pidfd)
            self.ranks.died(pidfd)

    def on_launcher(self, message: Message) -> None:
        """Handle the launcher's report: torchrun has ended."""
        self._read_rank_messages()
        self.result = message

    def end(self, verdict: Failure, *, stacks: bool = False) -> None:
        """Kill the ranks because of `verdict`; write their stacks before, if wanted."""
        now = self._host.monotonic()
        if self._verdict is not None:
            return
        if self._kill_at is None or self._kill_at > now:
            self._kill_at, self._stacks_wanted = now, stacks
        # An earlier failure of a rank of this node says more than that the ranks were ended with others.
        if verdict.kind is not FailureKind.ENDED or not self.ranks.failures:
            self._verdict = verdict

    @property
    def ending(self) -> bool:
        """Whether the ranks are being killed, or are about to be."""
        return self._kill_at is not None

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer of a program has taken a step."""
        return self._stepped_at > 0

    def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each rank of this node."""
        return self._helpers.heartbeats(self._nproc)

    # -- a turn ------------------------------------------------------------------------------------------------------

    def turn(self, *, others_busy: bool) -> None:
        """Handle what has happened: a death, a hang, a lost helper process, a stop request."""
        launcher, now = self._helpers.launcher, self._host.monotonic()
        assert launcher is not None
        self._launcher_check.skip(self._helpers.pulse.turn(now))
        self._host.reap_old(self._helpers.pids)
        if self.graceful.signalled and not self._stop:
            # An earlier death has to be known.
            self._loop.pump(0.0)
            if self.graceful.asked and self._verdict is None:
                self._stop.ask(f"a signal to rank {min(self.graceful.asked)}")
        if self.ranks.failures and self._kill_at is None:
            self._kill_at = now if self.ranks.cause_known else now + _CAUSE_GRACE_S
        self._check_agent(now)
        if not launcher.alive:
            # The fork server and the ranks end with it; the sweep ends what is left.
            self.result = self.result or {"finished": False, "failures": [], "launcher_lost": True}
        failed_saves, limit = self._checkpoints.failed_saves, self._config.checkpoint.max_failed_saves
        if self._stop or self.graceful.paused or storage_failed(failed_saves, limit):
            self.graceful.request()
            if self._stop.at_once or self.graceful.late or not self.graceful.worthwhile:
                self.end(Failure(FailureKind.ENDED, "ended at once on request"))
        if self._kill_at is None:
            self._check_hang(now, others_busy)
        if not self.failed_at and (self._kill_at is not None or not launcher.alive):
            self.failed_at = round(self._clock(), 3)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_ranks(now, self._kill_at)
        self._check_launcher(launcher, now)

    def _kill_ranks(self, now: float, since: float) -> None:
        if self._stacks_wanted:
            self._stacks_wanted = False
            self._write_stacks()
        self.ranks.kill()
        if self.ranks.pidfds and now > since + KILL_TIMEOUT_S and self.result is None:
            stuck = ", ".join(str(rank) for rank in sorted(self.ranks.pidfds.values()))
            cause = f"rank {stuck} does not end after SIGKILL: the kernel holds it (a driver, a file server)"
            self._verdict = Failure(FailureKind.BAD_NODE, cause)
            self.result = {"finished": False, "failures": []}
        if not self.ranks.pidfds:
            # Ranks that are forked but have not reported yet.
            self._host.kill_all(self._helpers.strays, timeout_s=0.2)

    def _write_stacks(self) -> list[Path]:
        pids = {f"rank{rank}": pid for rank, pid in sorted(self.ranks.pids.items())}
        return dump_stacks(pids, self._log_dir, lambda: self._loop.pump(_SOON_S))

    def _check_agent(self, now: float) -> None:
        assert self._helpers.agent is not None
        self._helpers.ping_agent(now)
        if not self._helpers.agent.alive:
            self.end(Failure(FailureKind.AGENT_LOST, "the checkpoint agent died, or stopped answering"))
        elif self._checkpoints.fenced is not None:
            self.end(Failure(FailureKind.FENCED, self._checkpoints.fenced))
        elif len(self._checkpoints.damaged) >= _MOST_DAMAGED:
            cause = f"{_MOST_DAMAGED} snapshots were damaged in this node's memory, the last one: "
            self.end(Failure(FailureKind.BAD_NODE, cause + self._checkpoints.damaged[-1]))

    def _check_hang(self, now: float, others_busy: bool) -> None:
        found = self.hangs.look(self.heartbeats(), now, others_busy=others_busy, ending=self.result is not None)
        if found is not None:
            self.end(found)

    def _check_launcher(self, launcher: LauncherHelper, now: float) -> None:
        """Kill a launcher that does not end."""
        overdue = self._launcher_check.look(now, killed=self._kill_at is not None and now >= self._kill_at)
        if overdue is None or self.result is not None:
            return
        launcher.end()
        self.result = {"finished": overdue.finished, "failures": [], "launcher_lost": not overdue.over}
        if not overdue.over and self._verdict is None:
            self._verdict = Failure(FailureKind.LAUNCHER_LOST, overdue.cause)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill the remaining ranks, and show the rest of their output."""
        self.ranks.kill()
        for pidfd in self.ranks.pidfds:
            self._loop.unregister(pidfd)
        self.ranks.close()
        self._host.kill_all(self._helpers.strays)
        self._host.reap_strays(self._helpers.pids)
        if self._relay is not None:
            self._relay.finish()

    def conclude(self, on_journal_clock: Callable[[float], float]) -> AttemptResult:
        """Return how the attempt ended; `on_journal_clock` converts a time of `machine_clock`."""
        assert self.result is not None
        beats = self.heartbeats()
        # A program with checkpoints of its own sends no heartbeats, but what it has loaded and saved.
        start_step = max((beat.start_step for beat in beats), default=0) or self._checkpoints.program_start
        step = max((beat.step for beat in beats), default=0) or self._checkpoints.program_step
        last_at = max((beat.time for beat in beats if beat.start_time), default=0.0)
        if not last_at and self._stepped_at:
            # Until now, as far as is known.
            last_at = machine_clock()
        failure = failure_of(
            self.result,
            self.ranks.ends(self.result["failures"]),
            start_step=start_step,
            step=step,
            has_stepped=self._stepped_at > 0,
            kernel_oom_kills=self._host.oom_kills() - self._oom_kills_before,
            idle={rank for rank, local in self.ranks.local_ranks.items() if _is_idle(beats, local)},
            verdict=self._verdict,
            failed_saves=self._checkpoints.failed_saves,
            max_failed_saves=self._config.checkpoint.max_failed_saves,
            script_signalled=self.graceful.script_signalled,
            asked=self.graceful.asked,
            # In a run of several nodes another one may have been asked.
            total_steps=self._checkpoints.total_steps,
            stopping=bool(self._stop),
            stop_known=self.spec.run_nodes > 1 or bool(self._stop) or self.graceful.requested,
        )
        return AttemptResult(
            failure.at_step(step),
            start_step,
            _converted(max((beat.start_time for beat in beats), default=0.0) or self._stepped_at, on_journal_clock),
            _converted(last_at, on_journal_clock),
            self.failed_at,
            self.ranks.log(failure.rank),
            any(beat.phase is not Phase.STARTING for beat in beats) or self._checkpoints.program_saves,
        )


def _is_idle(beats: list[Heartbeat], local_rank: int) -> bool:
    return local_rank < len(beats) and beats[local_rank].phase is Phase.IDLE


def _converted(machine_time: float, on_journal_clock: Callable[[float], float]) -> float:
    return round(on_journal_clock(machine_time), 3) if machine_time else 0.0
