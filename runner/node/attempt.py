"""One attempt on this node, while it runs: watches ranks and helpers, answers stop requests, ends what hangs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from checkpointing.agent.protocol import Message
from checkpointing.heartbeat import Heartbeat, Phase
from runner.config.schema import Config
from runner.journal.events import BestModel, RankStarted
from runner.node import rank_messages
from runner.node.agent_events import AgentEvents, Record
from runner.node.attempt_end import AttemptEnd, failure_of, storage_failed
from runner.node.hang_check import HangCheck
from runner.node.helpers import KILL_TIMEOUT_S, Helpers
from runner.node.messages import AttemptResult, AttemptSpec, Job
from runner.node.output import OutputRelay
from runner.node.rank_messages import RankMessage
from runner.node.rank_watch import RankWatch
from runner.node.stacks import dump_stacks
from runner.node.watchdog import Limits, Watchdog
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.event_loop import EventLoop, StopRequest
from runner.system.host import Host
from runner.ui.progress import ProgressDisplay

_SOON_S = 0.05
# A rank that says only that another one is gone: time for that one to say why.
_CAUSE_GRACE_S = 0.5
# From the last rank's death to torchrun's report of it; longer where it waits for a node that is gone.
_LAUNCHER_PATIENCE_S = 5.0
# The same where all ranks have ended well: nodes wait for each other.
_LAUNCHER_END_PATIENCE_S = 60.0


class Attempt:
    """Attributes:
    spec: What was asked for.
    ranks: The ranks of this node.
    result: The launcher's last message; the attempt is over once it is there.
    failed_at: First sign of a failure, seconds since the epoch; 0 where there was none.
    ending: The ranks are being killed, or are about to be.
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
    ) -> None:
        """
        Args:
            nproc: Ranks on this node.
            clock: The journal's.
            read_rank_messages: Has everything handled that ranks have sent so far.
        """
        self.spec, self._config, self._job, self._nproc, self._log_dir = spec, config, job, nproc, log_dir
        self._helpers, self._checkpoints, self._display, self._record = helpers, checkpoints, display, record
        self._clock, self._loop, self._stop, self._host = clock, loop, stop, host
        self._read_rank_messages = read_rank_messages
        now = host.monotonic()
        self._oom_kills_before = host.oom_kills()
        self._relay = OutputRelay(display.pass_on) if job.show_output else None
        self.ranks = RankWatch()
        self.result: Message | None = None
        self.failed_at = 0.0
        self._kill_at: float | None = None
        # Since when a message of the launcher is due.
        self._quiet_since = now
        self._stop_deadline: float | None = None
        # Ranks that have received a stop signal of their own.
        self._signalled: set[int] = set()
        # Why this runner ended the attempt; counts for more than what its ranks then say.
        self._verdict: Failure | None = None
        # The ranks' stacks are to be written down before they are killed.
        self._stacks_wanted = False
        # A script that makes no checkpoints of ours was sent SIGTERM.
        self._script_told = False
        self._hangs = HangCheck(
            Watchdog(Limits.of(config.restart), watch_start=job.script is None, now=now),
            ranks=self.ranks,
            helpers=helpers,
            display=display,
            record=record,
            host=host,
            write_stacks=self._write_stacks,
        )

    # -- what ranks and launcher report ------------------------------------------------------------------------------

    def on_rank_message(self, message: RankMessage) -> None:
        """Handle a message of a rank of this attempt."""
        match message:
            case rank_messages.Started():
                self._record(RankStarted(rank=message.rank, pid=message.pid))
                if self._relay is not None and message.error_file:
                    self._relay.follow(Path(message.error_file).parent)
                pidfd = self.ranks.started(message)
                if pidfd is not None:
                    self._loop.register(pidfd, self._on_rank_death)
            case rank_messages.Done(rank=rank):
                self.ranks.done.add(rank)
            case rank_messages.Preempted(rank=rank):
                self.ranks.preempted.add(rank)
            case rank_messages.Failed(rank=rank):
                self.ranks.errors[rank] = (message.error, message.frame, message.transient)
            case rank_messages.StopSignal(rank=rank):
                self._signalled.add(rank)
            case rank_messages.BestModelWritten(step=step):
                self._record(BestModel(step=step))

    def _on_rank_death(self, pidfd: int) -> None:
        # What it said before it died comes first.
        self._read_rank_messages()
        if pidfd in self.ranks.pidfds:
            self._loop.unregister(pidfd)
            self.ranks.died(pidfd)

    def on_launcher(self, message: Message) -> None:
        """Handle the launcher's report: torchrun has ended."""
        self._read_rank_messages()
        self.result = message

    # -- what others ask for -----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Have the ranks agree on a step, snapshot it, commit and end; they get the grace period for it."""
        if self._stop_deadline is not None:
            return
        grace_s, commit_s = self._config.restart.grace_s, self._checkpoints.commit_s
        self._stop_deadline = self._host.monotonic() + grace_s
        self._helpers.tell_agent("request_stop")
        if commit_s is not None and commit_s > grace_s:
            self._display.message(
                f"the last commit took {commit_s:.0f} s, and there are {grace_s:g} s for the next: it may not fit; "
                f"step {self._checkpoints.committed_step} is safe. A longer --grace or a checkpoint.local_tier gives "
                "it room"
            )
        # A script that does not use our checkpoints is told as torchrun would tell it.
        if self._job.script is not None and all(beat.phase is Phase.STARTING for beat in self.heartbeats()):
            self._script_told = True
            self.ranks.kill(signal.SIGTERM)

    def end(self, verdict: Failure, *, stacks: bool = False) -> None:
        """Kill the ranks: the attempt is over, for this reason.

        Args:
            stacks: Write down where they stand before.
        """
        now = self._host.monotonic()
        if self._verdict is not None:
            return
        if self._kill_at is None or self._kill_at > now:
            self._kill_at, self._stacks_wanted = now, stacks
        # A rank of ours that has failed before is a better answer than that others were told to end.
        if verdict.kind is not FailureKind.ENDED or not self.ranks.failures:
            self._verdict = verdict

    @property
    def busy(self) -> bool:
        """A rank of this node rightly does what is no step."""
        return self._hangs.busy

    @property
    def ending(self) -> bool:
        return self._kill_at is not None

    def heartbeats(self) -> list[Heartbeat]:
        """The newest of each rank of this node."""
        return self._helpers.heartbeats(self._nproc)

    # -- a turn ------------------------------------------------------------------------------------------------------

    def turn(self, *, others_busy: bool) -> None:
        """See what needs an answer: a death, a hang, a lost helper process, a stop request.

        Args:
            others_busy: On another node a rank rightly does what is no step.
        """
        launcher, now = self._helpers.launcher, self._host.monotonic()
        assert launcher is not None
        self._quiet_since += self._helpers.turn(now)
        if self._signalled and not self._stop:
            # A death before it is to be known.
            self._loop.pump(0.0)
            if self._asked and self._verdict is None:
                self._stop.ask(f"a signal to rank {min(self._asked)}")
        if self.ranks.failures and self._kill_at is None:
            self._kill_at = now if self.ranks.cause_known else now + _CAUSE_GRACE_S
        self._check_agent(now)
        if not launcher.alive:
            # The fork server ends with it and takes the ranks along; the sweep gets what is left.
            self.result = self.result or {"finished": False, "failures": [], "launcher_lost": True}
        if self._stop or self._storage_failed:
            self.request_stop()
            late = self._stop_deadline is not None and now > self._stop_deadline
            if self._stop.at_once or late or not self._may_stop_in_order():
                self.end(Failure(FailureKind.ENDED, "ended at once on request"))
        if self._kill_at is None:
            self._check_hang(now, others_busy)
        if not self.failed_at and (self._kill_at is not None or not launcher.alive):
            self.failed_at = round(self._clock(), 3)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_ranks(now, self._kill_at)
        self._check_launcher(now)

    @property
    def _asked(self) -> set[int]:
        """Ranks that somebody has asked to stop.

        torchrun, too, ends the others with SIGTERM when one has died, even one that was done: of what comes later,
        only what the dead one said counts.
        """
        first = self.ranks.deaths[:1]
        return self._signalled & set(first) if first else self._signalled

    @property
    def _storage_failed(self) -> bool:
        return storage_failed(self._checkpoints.failed_saves, self._config.checkpoint.max_failed_saves)

    def _may_stop_in_order(self) -> bool:
        """Whether waiting can save anything: a training loop is there, or a script that may have its own answer."""
        if any(beat.phase not in (Phase.STARTING, Phase.RESTORING) for beat in self.heartbeats()):
            return True
        return self._job.script is not None and bool(self.ranks.pidfds)

    def _kill_ranks(self, now: float, since: float) -> None:
        if self._stacks_wanted:
            self._stacks_wanted = False
            self._write_stacks()
        self.ranks.kill()
        if self.ranks.pidfds and now > since + KILL_TIMEOUT_S and self.result is None:
            stuck = ", ".join(str(rank) for rank in sorted(self.ranks.pidfds.values()))
            cause = f"rank {stuck} does not end by SIGKILL: the kernel holds it (a driver, a file server)"
            self._verdict = Failure(FailureKind.BAD_NODE, cause)
            self.result = {"finished": False, "failures": []}
        if not self.ranks.pidfds:
            # Ranks that are forked but have not introduced themselves yet.
            self._host.kill_all(self._helpers.strays, timeout_s=0.2)

    def _write_stacks(self) -> list[Path]:
        pids = {f"rank{rank}": pid for rank, pid in sorted(self.ranks.pids.items())}
        return dump_stacks(pids, self._log_dir, lambda: self._loop.pump(_SOON_S))

    def _check_agent(self, now: float) -> None:
        assert self._helpers.agent is not None
        self._helpers.ping_agent(now)
        if not self._helpers.agent.alive:
            self.end(Failure(FailureKind.AGENT_LOST, "the checkpoint agent died, or answered no more"))
        elif self._checkpoints.fenced is not None:
            self.end(Failure(FailureKind.FENCED, self._checkpoints.fenced))

    def _check_hang(self, now: float, others_busy: bool) -> None:
        found = self._hangs.look(self.heartbeats(), now, others_busy=others_busy, ending=self.result is not None)
        if found is not None:
            self.end(found)

    def _check_launcher(self, now: float) -> None:
        """Kill a launcher that does not end: torchrun reports once all ranks are gone, unless it waits for a node."""
        launcher, ranks = self._helpers.launcher, self.ranks
        assert launcher is not None
        ended = self._kill_at is not None and now >= self._kill_at
        finished = not ranks.pidfds and len(ranks.done) == self._nproc
        over = ended or (not ranks.pidfds and len(ranks.deaths) >= self._nproc)
        if not ranks.pids and not ended:
            # It has yet to fork the first rank, or waits for the other nodes.
            patience = self._config.restart.quiet_timeout_s
            cause = f"no rank was started within {patience:g} s (restart.quiet_timeout_s); the launcher was killed"
        else:
            cause = "the launcher did not end with its ranks, and was killed"
            patience = _LAUNCHER_PATIENCE_S if ended else _LAUNCHER_END_PATIENCE_S
            if ranks.pidfds or not over:
                self._quiet_since = now
        if now - self._quiet_since > patience and self.result is None:
            launcher.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(KILL_TIMEOUT_S)
            self.result = {"finished": finished, "failures": [], "launcher_lost": not over}
            if not over and self._verdict is None:
                self._verdict = Failure(FailureKind.LAUNCHER_LOST, cause)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave no rank alive, and show the rest of their output."""
        self.ranks.kill()
        for pidfd in list(self.ranks.pidfds):
            self._loop.unregister(pidfd)
        self.ranks.close()
        self._host.kill_all(self._helpers.strays)
        self._host.reap_strays(self._helpers.pids)
        if self._relay is not None:
            self._relay.finish()

    def conclude(self, on_journal_clock: Callable[[float], float]) -> AttemptResult:
        """How the attempt went.

        Args:
            on_journal_clock: A time of `machine_clock` as seconds since the epoch.
        """
        assert self.result is not None
        beats = self.heartbeats()
        start_step = max((beat.start_step for beat in beats), default=0)
        step = max((beat.step for beat in beats), default=0)
        failure = failure_of(
            AttemptEnd(
                self.result,
                rank_ends=self.ranks.ends(self.result["failures"]),
                start_step=start_step,
                step=step,
                kernel_oom_kills=self._host.oom_kills() - self._oom_kills_before,
                verdict=self._verdict,
                failed_saves=self._checkpoints.failed_saves,
                max_failed_saves=self._config.checkpoint.max_failed_saves,
                script_told=self._script_told,
                asked=frozenset(self._asked),
                # Of several nodes, another one may have been asked.
                stop_known=self._config.launch.nnodes > 1 or bool(self._stop) or self._stop_deadline is not None,
            )
        )

        def on_clock(machine_time: float) -> float:
            return round(on_journal_clock(machine_time), 3) if machine_time else 0.0

        return AttemptResult(
            failure.at_step(step),
            start_step,
            on_clock(max((beat.start_time for beat in beats), default=0.0)),
            on_clock(max((beat.time for beat in beats if beat.start_time), default=0.0)),
            self.failed_at,
            self.ranks.log(failure.rank),
            any(beat.phase is not Phase.STARTING for beat in beats),
        )
