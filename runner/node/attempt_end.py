"""How an attempt ends: in good order on request, within the grace period, and for which reason in any case."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence, Set

from checkpointing.agent.protocol import Message
from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.journal.attempts import Job
from runner.node.agent_events import AgentEvents
from runner.node.helpers import Helpers
from runner.ranks.watch import RankWatch
from runner.recovery.classify import RankEnd, classify
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind, kind_of_error
from runner.system.processes import Host
from runner.ui.progress import ProgressDisplay


class GracefulStop:
    """Has the ranks agree on a step, take a snapshot, commit it and exit, and measures the grace period.

    Attributes:
        script_signalled: Whether a script without checkpoints of ours was sent SIGTERM.
        paused: Whether the ranks are to stop for a change of the nodes, after which the run continues.
        signalled: Ranks that have received a stop signal of their own.
    """

    def __init__(
        self,
        job: Job,
        grace_s: float,
        *,
        ranks: RankWatch,
        helpers: Helpers,
        checkpoints: AgentEvents,
        display: ProgressDisplay,
        host: Host,
        heartbeats: Callable[[], Sequence[Heartbeat]],
    ) -> None:
        self._job, self._grace_s, self._ranks, self._helpers = job, grace_s, ranks, helpers
        self._checkpoints, self._display, self._host, self._heartbeats = checkpoints, display, host, heartbeats
        self._deadline: float | None = None
        # The agent was asked to commit what it has.
        self._is_saved = False
        self.signalled: set[int] = set()
        self.script_signalled = self.paused = False

    @property
    def requested(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the grace period is over."""
        return self._deadline is not None and self._host.monotonic() > self._deadline

    @property
    def asked(self) -> set[int]:
        """Ranks that were asked to stop by something other than torchrun.

        When a rank has died, torchrun ends the others with SIGTERM, even one that had finished: of signals that come
        later, only that of the dead rank counts.
        """
        first = self._ranks.deaths[:1]
        return self.signalled & set(first) if first else self.signalled

    def request(self) -> None:
        """Have the ranks stop; they get the grace period for it, once. Called again and again while they do."""
        if self._deadline is not None:
            self._save_what_there_is(self._deadline)
            return
        commit_s = self._checkpoints.commit_s
        self._deadline = self._host.monotonic() + self._grace_s
        self._helpers.request_agent("request_stop")
        if commit_s is not None and commit_s > self._grace_s:
            self._display.message(
                f"the last commit took {commit_s:.0f} s, and the grace period for the next one is {self._grace_s:g} s: "
                f"it may not finish; step {self._checkpoints.committed_step} is safe. A longer --grace or a "
                "checkpoint.local_tier gives it time"
            )
        # A program that does not use our checkpoints is stopped as torchrun would stop it.
        if not self.saves:
            self.script_signalled = True
            self._ranks.kill(signal.SIGTERM)

    def _save_what_there_is(self, deadline: float) -> None:
        """Have the newest snapshot committed in time, where ranks may not end: in a long evaluation, for example."""
        if not self._is_saved and self._host.monotonic() > deadline - self._grace_s / 2:
            self._is_saved = self._helpers.request_agent("commit_newest")

    @property
    def saves(self) -> bool:
        """Whether the ranks save when they are asked to stop: the bundled job, and programs that have begun to."""
        return self._job.program is None or any(beat.phase is not Phase.STARTING for beat in self._heartbeats())

    @property
    def is_training(self) -> bool:
        """Whether some rank of this node has begun to take steps."""
        return any(beat.phase not in (Phase.STARTING, Phase.RESTORING) for beat in self._heartbeats())

    @property
    def worthwhile(self) -> bool:
        """Whether waiting can save anything: a training loop runs, or a script that may handle the signal itself."""
        return self.is_training or (self._job.program is not None and bool(self._ranks.pidfds))


def _lost_launcher(launcher_result: Message, rank_ends: Sequence[RankEnd]) -> str:
    """Return which process that starts ranks has died; empty if none has."""
    if launcher_result.get("launcher_lost"):
        return "the launcher died"
    # The kernel kills the ranks with it.
    is_cause = launcher_result.get("fork_server_lost") and not any(end.error for end in rank_ends)
    return "the launcher's fork server died, and all ranks with it" if is_cause else ""


def storage_failed(failed_saves: tuple[int, str], limit: int | None) -> bool:
    """Return whether so many saves in a row failed that training should end."""
    return limit is not None and failed_saves[0] >= limit


def failure_of(
    launcher_result: Message,
    rank_ends: Sequence[RankEnd] = (),
    *,
    start_step: int = 0,
    step: int = 0,
    has_stepped: bool = False,
    kernel_oom_kills: int = 0,
    idle: Set[int] = frozenset(),
    verdict: Failure | None = None,
    failed_saves: tuple[int, str] = (0, ""),
    max_failed_saves: int | None = None,
    script_signalled: bool = False,
    asked: Set[int] = frozenset(),
    stopping: bool = False,
    stop_known: bool = False,
    total_steps: int | None = None,
) -> Failure:
    """Return why an attempt ended on this node; the kind of a good end is not a failure. Pure.

    The launcher's result is its last message, or one in its place for a launcher that was lost. A script that sends no
    heartbeats may have trained, too (`has_stepped`). Ranks in `idle` ran no
    training step when they ended. The `verdict` is why this runner ended the attempt, if it did. `failed_saves` are
    those of a tier in a row, and why the last one failed. With `script_signalled`, a script without checkpoints of ours
    was sent SIGTERM; ranks in `asked` were asked to stop by something other than the runner; with `stopping`, the
    runner was, and with `stop_known`, that or another node may have been. Training ends at `total_steps`, if that is
    known.
    """
    finished = bool(launcher_result["finished"])
    if storage_failed(failed_saves, max_failed_saves) and not finished:
        count, error = failed_saves
        cause = f"{count} saves in a row failed (checkpoint.max_failed_saves), the last one: {error}"
        return Failure(FailureKind.STORAGE_FAILED, cause)
    if verdict is not None and not finished:
        return verdict
    if script_signalled and finished:
        # The script handled the signal itself, which does not mean that training has finished.
        return Failure(FailureKind.PREEMPTED, "the script has ended in answer to SIGTERM")
    if finished and (stopping or asked) and (total_steps is None or step < total_steps):
        # By a handler or a callback of its own; where it is not known that this was its last step, a start finds out.
        return Failure(FailureKind.PREEMPTED, "the script has ended before its last step, after a stop request")
    if lost := _lost_launcher(launcher_result, rank_ends):
        return Failure(FailureKind.LAUNCHER_LOST, lost)
    if total_steps is not None and step >= total_steps:
        # No step is left whose micro-batches could be smaller.
        idle = {end.rank for end in rank_ends}
    failure = classify(
        list(rank_ends),
        finished=finished,
        started_step=start_step,
        step=step,
        has_stepped=has_stepped,
        kernel_oom_kills=kernel_oom_kills,
        idle=idle,
    )
    if failure.kind is FailureKind.PREEMPTED and not stop_known and not asked:
        cause = "the script exited with status 75, which is reserved for stop requests, but no stop was requested"
        return Failure(FailureKind.CRASHED, cause, step=step, signature="status 75")
    if failure.kind is FailureKind.LAUNCHER_LOST and launcher_result.get("error"):
        error = launcher_result["error"]
        if kind_of_error(error) is FailureKind.STORAGE_FAILED:
            # It could not write its logs; ranks that meet a full disk end the run in the same way.
            return Failure(FailureKind.STORAGE_FAILED, error + FailureKind.STORAGE_FAILED.rule.advice)
        return Failure(FailureKind.LAUNCHER_LOST, error)
    return failure
