"""Finds the rank or the helper process that hangs in an attempt, names the cause, and writes stacks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.host.heartbeat import Heartbeat
from runner.journal import events
from runner.journal.events import Record
from runner.node.helpers import Helpers
from runner.ranks.watch import RankWatch
from runner.ranks.watchdog import Hang, StoppedProcesses, Watchdog
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system import processes
from runner.system.processes import Host
from runner.ui.progress import ProgressDisplay

_STATES_EVERY_S = 1.0
_MAX_PATIENCE = 64.0
# Keys of the helpers among those of the ranks, which are their numbers.
_AGENT, _LAUNCHER = -1, -2
# From the last rank's death to torchrun's report of it; longer while torchrun waits for a node that is gone.
_REPORT_PATIENCE_S = 5.0
# The same if all ranks have ended well: nodes wait for each other.
_END_PATIENCE_S = 60.0
_SPY_TIMEOUT_S = 8.0


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
        self.watchdog, self._ranks, self._helpers = watchdog, ranks, helpers
        self._display, self._record, self._host = display, record, host
        self._write_stacks = write_stacks
        self._stopped = StoppedProcesses()
        self._states_seen_at = 0.0

    @property
    def next_patience(self) -> float:
        """The watchdog's patience in the next attempt.

        It is doubled for as long as attempts hang by that limit: what a script does there may take longer, each time.
        """
        return min(2 * self.watchdog.patience, _MAX_PATIENCE) if self.watchdog.patience_used_up else 1.0

    def look(self, beats: Sequence[Heartbeat], now: float, *, others_busy: bool, ending: bool) -> Failure | None:
        """Find what hangs; write the ranks' stacks if it is a rank, and kill a helper process that was stopped.

        With `ending`, the launcher has reported, and ranks are not examined any more.
        """
        ranks, stopped = self._ranks, self._find_stopped(now)
        if _AGENT in stopped or _LAUNCHER in stopped:
            # Ranks that wait for the helper process did not fail.
            return self._end_stopped_helper(_AGENT if _AGENT in stopped else _LAUNCHER)
        rank_of = {local: rank for rank, local in ranks.local_ranks.items()}
        hang = self.watchdog.look(beats, now, others_busy=others_busy)
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

    def _end_stopped_helper(self, key: int) -> Failure:
        helper, what, kind = {
            _AGENT: (self._helpers.agent, "checkpoint agent", FailureKind.AGENT_LOST),
            _LAUNCHER: (self._helpers.launcher, "launcher", FailureKind.LAUNCHER_LOST),
        }[key]
        assert helper is not None
        helper.kill()
        return Failure(kind, f"the {what} was stopped (SIGSTOP to pid {helper.pid}) and then killed")


@dataclass(frozen=True)
class Overdue:
    """A launcher whose report is overdue: why, whether all ranks had finished, and whether they are gone (`over`)."""

    cause: str
    finished: bool
    over: bool


class LauncherCheck:
    """Measures for how long a report of the launcher is due: torchrun reports once all ranks are gone."""

    def __init__(self, ranks: RankWatch, nproc: int, quiet_timeout_s: float, now: float) -> None:
        self._ranks, self._nproc, self._quiet_timeout_s = ranks, nproc, quiet_timeout_s
        self._quiet_since = now

    def skip(self, seconds: float) -> None:
        """Leave out a time for which this process was stopped."""
        self._quiet_since += seconds

    def look(self, now: float, *, killed: bool) -> Overdue | None:
        """Return whether the report is overdue at `now`; `killed` if this runner has killed the ranks."""
        ranks, patience_s = self._ranks, self._quiet_timeout_s
        finished = not ranks.pidfds and len(ranks.done) == self._nproc
        over = killed or (not ranks.pidfds and len(ranks.deaths) >= self._nproc)
        if not ranks.pids and not killed:
            # It has yet to start the first rank, or waits for the other nodes.
            cause = f"no rank was started within {patience_s:g} s (restart.quiet_timeout_s); the launcher was killed"
        else:
            cause = "the launcher did not end with its ranks, and was killed"
            patience_s = _REPORT_PATIENCE_S if killed else _END_PATIENCE_S
            if ranks.pidfds or not over:
                self._quiet_since = now
        return Overdue(cause, finished, over) if now - self._quiet_since > patience_s else None


def dump_stacks(pids: Mapping[str, int], folder: Path, pump: Callable[[], None]) -> list[Path]:
    """Write the stacks of processes, given by name, to `stacks-<name>.txt` in a folder; return the files.

    Python and native stacks by py-spy, and the kernel's view. It never raises, takes 8 seconds at most, and calls
    `pump` meanwhile; errors are written to the files.
    """
    files = []
    dumps: list[tuple[subprocess.Popen[bytes], Path]] = []
    for name, pid in pids.items():
        path = folder / f"stacks-{name}.txt"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(_kernel_view(pid))
                file.flush()
                with contextlib.suppress(OSError):
                    dumps.append((subprocess.Popen(_command(pid), stdout=file, stderr=file), path))
            files.append(path)
    deadline = time.monotonic() + _SPY_TIMEOUT_S
    while any(process.poll() is None for process, _ in dumps) and time.monotonic() < deadline:
        pump()
    for process, path in dumps:
        if process.poll() is None:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError), path.open("ab") as file:
                file.write(f"\npy-spy was ended after {_SPY_TIMEOUT_S:.0f} s\n".encode())
    return files


def _command(pid: int) -> list[str]:
    """Return py-spy's command; it only reads the memory of a stopped process, whose native frames it cannot unwind."""
    spy = Path(sys.executable).with_name("py-spy")
    how = "--nonblocking" if processes.state(pid) in ("T", "t", "D", "Z") else "--native"
    return [str(spy) if spy.exists() else "py-spy", "dump", how, "--pid", str(pid)]


def _kernel_view(pid: int) -> bytes:
    lines = [f"process {pid}, state {processes.state(pid)}"]
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):
            lines.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            lines.append(
                f"thread {task.name}: {(task / 'comm').read_text().strip()}, state {processes.state(int(task.name))}"
            )
    return ("\n".join(lines) + "\n\n").encode()
