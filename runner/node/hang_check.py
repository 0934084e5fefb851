"""Finds the rank or the helper process that hangs in an attempt, and names the cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing.host.heartbeat import Heartbeat
from runner.journal import events
from runner.journal.events import Record
from runner.node.helper_processes import AgentHelper, LauncherHelper
from runner.node.helpers import Helpers
from runner.ranks.watch import RankWatch
from runner.ranks.watchdog import Hang, StoppedProcesses, Watchdog
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.host import Host
from runner.ui.progress import ProgressDisplay

_STATES_EVERY_S = 1.0
_MAX_PATIENCE = 64.0
# Keys of the helpers among those of the ranks, which are their numbers.
_AGENT, _LAUNCHER = -1, -2


class HangCheck:
    """Combines the watchdog, which reads heartbeats, with the kernel's states of processes, which show SIGSTOP."""

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        ranks: RankWatch,
        helpers: Helpers,
        display: ProgressDisplay,
        record: Record,
        host: Host,
        write_stacks: Callable[[], list[Path]],
    ) -> None:
        """Begin to watch.

        Args:
            watchdog: Finds ranks without a heartbeat.
            ranks: The ranks of the attempt on this node.
            helpers: The agent and the launcher.
            display: The console.
            record: Appends an event to the journal.
            host: The operating system.
            write_stacks: Writes the stacks of all ranks; returns the files.
        """
        self._watchdog, self._ranks, self._helpers = watchdog, ranks, helpers
        self._display, self._record, self._host = display, record, host
        self._write_stacks = write_stacks
        self._stopped = StoppedProcesses()
        self._states_seen_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether, at the last look, a rank of this node was legitimately not computing steps."""
        return self._watchdog.busy

    def be_patient(self, factor: float) -> None:
        """Multiply the limit that comes from the run's own step times."""
        self._watchdog.patience = factor

    @property
    def next_patience(self) -> float:
        """The factor for the next attempt.

        It is doubled for as long as attempts hang by that limit: what a script does there may take longer, each time.
        """
        return min(2 * self._watchdog.patience, _MAX_PATIENCE) if self._watchdog.patience_used_up else 1.0

    def look(self, beats: Sequence[Heartbeat], now: float, *, others_busy: bool, ending: bool) -> Failure | None:
        """Find what hangs, and write the ranks' stacks if it is a rank.

        A helper process that was stopped is killed.

        Args:
            beats: The newest heartbeat of each rank of this node.
            now: Monotonic seconds.
            others_busy: Whether a rank of another node is legitimately not computing steps.
            ending: Whether the launcher has reported; ranks are not examined any more.

        Returns:
            The failure; None if nothing hangs.
        """
        ranks, stopped = self._ranks, self._find_stopped(now)
        if _AGENT in stopped or _LAUNCHER in stopped:
            # Ranks that wait for the helper process did not fail.
            return self._end_stopped_helper(_AGENT if _AGENT in stopped else _LAUNCHER)
        rank_of = {local: rank for rank, local in ranks.local_ranks.items()}
        hang = self._watchdog.look(beats, now, others_busy=others_busy)
        if hang is None and stopped:
            hang = Hang(tuple(ranks.local_ranks[rank] for rank in stopped), "the process was stopped (SIGSTOP)")
        if hang is None or ending:
            return None
        hung = [rank_of[slot] for slot in hang.slots if slot in rank_of]
        names = f"rank {', '.join(map(str, hung))}" if hung else "the ranks"
        self._display.message(f"{names}: {hang.reason}; writing the stacks of all ranks")
        files = self._write_stacks()
        self._record(events.HangFound(ranks=hung, reason=hang.reason, stacks=[str(file) for file in files]))
        where = f"; stacks: {files[0].parent}/stacks-*.txt" if files else ""
        return Failure(FailureKind.HUNG, f"{names} hung: {hang.reason}{where}", hung[0] if hung else None)

    def _find_stopped(self, now: float) -> list[int]:
        """Return the ranks and helpers that are stopped; examines them about once a second."""
        agent, launcher = self._helpers.agent, self._helpers.launcher
        assert agent is not None and launcher is not None
        if now - self._states_seen_at < _STATES_EVERY_S:
            return []
        self._states_seen_at = now
        pids = {rank: self._ranks.pids[rank] for rank in self._ranks.pidfds.values()}
        pids |= {_AGENT: agent.pid, _LAUNCHER: launcher.pid}
        return self._stopped.look({name: self._host.process_state(pid) for name, pid in pids.items()}, now)

    def _end_stopped_helper(self, name: int) -> Failure:
        agent, launcher = self._helpers.agent, self._helpers.launcher
        assert agent is not None and launcher is not None
        helper: AgentHelper | LauncherHelper = agent if name == _AGENT else launcher
        what, kind = {
            _AGENT: ("checkpoint agent", FailureKind.AGENT_LOST),
            _LAUNCHER: ("launcher", FailureKind.LAUNCHER_LOST),
        }[name]
        helper.kill()
        return Failure(kind, f"the {what} was stopped (SIGSTOP to pid {helper.pid}) and then killed")
