"""Finds what stands still in an attempt, rank or helper process, and says whom it is to be blamed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing.heartbeat import Heartbeat
from runner.journal import events
from runner.node.agent_events import Record
from runner.node.helper_processes import AgentHelper, LauncherHelper
from runner.node.helpers import Helpers
from runner.node.rank_watch import RankWatch
from runner.node.watchdog import Hang, StoppedProcesses, Watchdog
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.host import Host
from runner.ui.progress import ProgressDisplay

_STATES_EVERY_S = 1.0
# Names of the helpers beside the ranks' numbers.
_AGENT, _LAUNCHER = -1, -2


class HangCheck:
    """Combines the watchdog's verdict on heartbeats with the kernel's on processes that somebody has stopped."""

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
        self._watchdog, self._ranks, self._helpers = watchdog, ranks, helpers
        self._display, self._record, self._host = display, record, host
        self._write_stacks = write_stacks
        self._stopped = StoppedProcesses()
        self._states_seen_at = 0.0

    @property
    def busy(self) -> bool:
        """At the last look, a rank of this node rightly did what is no step."""
        return self._watchdog.busy

    def look(self, beats: Sequence[Heartbeat], now: float, *, others_busy: bool, ending: bool) -> Failure | None:
        """What hangs at this moment (monotonic seconds), with the ranks' stacks written down; None if nothing does.

        A helper process that was stopped is killed.

        Args:
            others_busy: On another node a rank rightly does what is no step.
            ending: The launcher has reported; ranks are not looked at any more.
        """
        ranks, stopped = self._ranks, self._find_stopped(now)
        if _AGENT in stopped or _LAUNCHER in stopped:
            # Ranks that wait for it are not to blame.
            return self._end_stopped_helper(_AGENT if _AGENT in stopped else _LAUNCHER)
        rank_of = {local: rank for rank, local in ranks.local_ranks.items()}
        hang = self._watchdog.look(beats, now, others_busy=others_busy)
        if hang is None and stopped:
            hang = Hang(tuple(ranks.local_ranks[rank] for rank in stopped), "somebody has stopped it (SIGSTOP)")
        if hang is None or ending:
            return None
        hung = [rank_of[slot] for slot in hang.slots if slot in rank_of]
        names = f"rank {', '.join(map(str, hung))}" if hung else "the ranks"
        self._display.message(f"{names}: {hang.reason}; writing down where all ranks stand")
        files = self._write_stacks()
        self._record(events.Hang(ranks=hung, reason=hang.reason, stacks=[str(file) for file in files]))
        where = f"; stacks: {files[0].parent}/stacks-*.txt" if files else ""
        return Failure(FailureKind.HUNG, f"{names} hung: {hang.reason}{where}", hung[0] if hung else None)

    def _find_stopped(self, now: float) -> list[int]:
        """Ranks and helpers that somebody has stopped; looked for about once a second."""
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
        return Failure(kind, f"somebody has stopped the {what} (SIGSTOP to pid {helper.pid}); it was killed")
