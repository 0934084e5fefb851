"""The orderly end of an attempt: ranks agree on a step, take a snapshot, commit it and exit within the grace period."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.journal.attempts import Job
from runner.node.agent_events import AgentEvents
from runner.node.helpers import Helpers
from runner.ranks.watch import RankWatch
from runner.system.processes import Host
from runner.ui.progress import ProgressDisplay


class GracefulStop:
    """Requests the end of an attempt once, and measures the grace period.

    Attributes:
        script_signalled: Whether a script without checkpoints of ours was sent SIGTERM.
        paused: Whether the ranks are to stop for a change of the nodes, after which the run continues.
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
        """Prepare for a stop request.

        Args:
            job: What runs.
            grace_s: Seconds from the request to the end of the ranks.
            ranks: The ranks of the attempt on this node.
            helpers: Has the agent, which sets the stop flag.
            checkpoints: Knows how long commits take.
            display: Shows a grace period that is too short.
            host: Has the time.
            heartbeats: Returns the newest heartbeat of each rank.
        """
        self._job, self._grace_s, self._ranks, self._helpers = job, grace_s, ranks, helpers
        self._checkpoints, self._display, self._host, self._heartbeats = checkpoints, display, host, heartbeats
        self._deadline: float | None = None
        # Ranks that have received a stop signal of their own.
        self._signalled: set[int] = set()
        self.script_signalled = self.paused = False

    @property
    def requested(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the grace period is over."""
        return self._deadline is not None and self._host.monotonic() > self._deadline

    def on_signal(self, rank: int) -> None:
        """Note that a rank has received a stop signal of its own."""
        self._signalled.add(rank)

    @property
    def signalled(self) -> bool:
        """Whether some rank has received a stop signal of its own."""
        return bool(self._signalled)

    @property
    def asked(self) -> set[int]:
        """Ranks that were asked to stop by something other than torchrun.

        When a rank has died, torchrun ends the others with SIGTERM, even one that had finished: of signals that come
        later, only that of the dead rank counts.
        """
        first = self._ranks.deaths[:1]
        return self._signalled & set(first) if first else self._signalled

    def request(self) -> None:
        """Have the ranks agree on a step, snapshot it, commit and exit; they get the grace period for it."""
        if self._deadline is not None:
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
        # A script that does not use our checkpoints is stopped as torchrun would stop it.
        if self._job.script is not None and all(beat.phase is Phase.STARTING for beat in self._heartbeats()):
            self.script_signalled = True
            self._ranks.kill(signal.SIGTERM)

    @property
    def is_training(self) -> bool:
        """Whether some rank of this node has begun to take steps."""
        return any(beat.phase not in (Phase.STARTING, Phase.RESTORING) for beat in self._heartbeats())

    @property
    def worthwhile(self) -> bool:
        """Whether waiting can save anything: a training loop runs, or a script that may handle the signal itself."""
        if self.is_training:
            return True
        return self._job.script is not None and bool(self._ranks.pidfds)
