"""What a runner has from its first moment to its last, whether it leads a run or follows: loop, signals, journal."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpointing.memory import separate_oom_kills
from runner.config.schema import Config
from runner.journal.journal import Journal, SteadyClock, read_journal
from runner.journal.run_directory import RunDirectory
from runner.preemption.watcher import Notice, NoticeWatcher
from runner.system import processes
from runner.system.event_loop import EventLoop, StopRequest
from runner.ui.progress import ProgressDisplay

STOP_TEXT = "the ranks snapshot, commit and end; once more to end at once"

# A socket's path has 107 bytes at most (unix(7)); the longest of ours, multiprocessing's, take 68 below the folder.
_LONGEST_FOLDER_BYTES = 38


def _temporary_folder() -> str:
    """The user's (TMPDIR), or, where that leaves no room for the name of a socket, one that does."""
    folder = tempfile.gettempdir()
    others = (os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp", "/dev/shm")
    usable = (name for name in (folder, *others) if name and len(os.fsencode(name)) <= _LONGEST_FOLDER_BYTES)
    return next((name for name in usable if os.access(name, os.W_OK | os.X_OK)), folder)


class Life:
    """A context: on entry nothing of an earlier life is left, at the end nothing of this one.

    Attributes:
        attempt: the newest attempt known, that events are recorded under.
        clock: the journal's.
        runtime: a folder for sockets, removed at the end.
        stop: whether the run was asked to stop, by a signal, a rank or a cloud.
    """

    def __init__(self, config: Config, directory: RunDirectory, display: ProgressDisplay, stop: StopRequest) -> None:
        """`stop` counts signals already."""
        self.config, self.directory, self.display = config, directory, display
        self.run_id = directory.run_id()
        self.loop = EventLoop()
        self.stop = stop
        events = read_journal(directory.journal)
        self.attempt = max((event["attempt"] for event in events), default=0)
        self.clock = SteadyClock(max((event["time"] for event in events), default=0.0))
        self._stack = contextlib.ExitStack()
        self._stop_told = False

    def __enter__(self) -> Life:
        processes.become_subreaper()
        processes.yield_to_others()
        # A rank that takes too much memory must not take the runner along, and the snapshots that it is restarted from.
        separate_oom_kills()
        rank = self.config.launch.node_rank
        strays = processes.kill_all(lambda: processes.processes_of_run(self.run_id, rank))
        if strays:
            self.display.message(f"ended {strays} processes that an earlier life of this run had left")
        mark = processes.mark(self.run_id, rank)
        processes.remove_semaphores(mark)
        self._stack.callback(processes.remove_semaphores, mark)
        self._journal = Journal(self.directory.journal, self.clock)
        self._stack.callback(self._close_journal)
        # Short, and no other run's.
        mine = hashlib.blake2b(f"{self.run_id}/{rank}".encode(), digest_size=5).digest()
        folder, prefix = _temporary_folder(), f"runner-{base64.b32encode(mine).decode().lower()}"
        for left in Path(folder).glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        runtime = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
        self.runtime = Path(self._stack.enter_context(runtime))
        self._stack.callback(self.loop.close)
        self.loop.wake_by_signals()
        restart = self.config.restart
        if restart.preemption_notices != "off":
            watcher = NoticeWatcher(
                restart.preemption_notices,
                restart.metadata_endpoint,
                lambda notice: self.loop.call(lambda: self._on_notice(notice)),
                lambda text: self.loop.call(lambda: self.display.message(text)),
            )
            watcher.start()
            self._stack.callback(watcher.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _close_journal(self) -> None:
        if not self._journal.is_complete:
            print(
                f"runner: warning: {self.directory.journal} could not be written to the end (is the disk full?): "
                "runner status will not know how this run ended",
                file=sys.stderr,
            )
        self._journal.close()

    def record(self, event: str, **details: Any) -> None:
        """Append to the journal."""
        self._journal.append(event, self.attempt, **details)

    def tell_stop(self) -> bool:
        """Tell user and journal of a stop request, once; returns whether that was now."""
        if not self.stop or self._stop_told:
            return False
        self._stop_told = True
        self.record("stop_requested", reason=self.stop.reason)
        self.display.message(f"stop requested ({self.stop.reason}): {STOP_TEXT}")
        return True

    def sleep(self, seconds: float) -> None:
        """Wait, but not once a stop is asked for."""
        self.loop.pump_until(lambda: bool(self.stop), time.monotonic() + seconds)

    def _on_notice(self, notice: Notice) -> None:
        left = round(notice.seconds_left, 1) if notice.seconds_left is not None else None
        if notice.is_old:
            self.display.message(f"{notice.source}: {notice.what}: posted before this runner started; continuing")
            return
        self.record("preemption_notice", source=notice.source, what=notice.what, seconds_left=left)
        self.stop.ask(f"{notice.source}: {notice.what}")
