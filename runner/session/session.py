"""What a runner holds from its start to its exit, leader or follower: event loop, stop request, journal."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from checkpointing.agent.events import Event
from checkpointing.host.memory import separate_oom_kills
from runner.config.schema import Config
from runner.journal.events import Entry, PreemptionNotice, SaveRequested, StopRequested
from runner.journal.journal import Journal, SteadyClock, read_journal
from runner.journal.run_directory import RunDirectory
from runner.preemption import Notice, NoticeWatcher
from runner.session.requests import Requests
from runner.system import processes
from runner.system.event_loop import EventLoop, StopRequest
from runner.ui.progress import ProgressDisplay

STOP_TEXT = "the ranks take a snapshot, commit and exit; repeat the request to end at once"
UNSAVED_STOP_TEXT = "nothing of this program is saved so far: it is sent SIGTERM; repeat the request to end at once"

# A socket's path has at most 107 bytes (unix(7)); the longest ones here, multiprocessing's, need 68 below the folder.
_LONGEST_FOLDER_BYTES = 38


def short_temporary_folder() -> str:
    """Return the user's temporary folder (TMPDIR), or another one if that leaves no room for the name of a socket."""
    folder = tempfile.gettempdir()
    others = (os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp", "/dev/shm")
    usable = (name for name in (folder, *others) if name and len(os.fsencode(name)) <= _LONGEST_FOLDER_BYTES)
    return next((name for name in usable if os.access(name, os.W_OK | os.X_OK)), folder)


class Session:
    """A context: on entry it removes what an earlier session left, at the end what this one started.

    Attributes:
        config: The resolved configuration.
        directory: The run's folder.
        display: The console.
        run_id: Identity of the run.
        loop: The event loop.
        stop: Whether the run was asked to stop, by a signal, a file, a rank or a cloud.
        requests: What else people ask of the run.
        attempt: Newest known attempt, under which events are recorded.
        clock: The journal's clock, in seconds since the epoch.
        monotonic: The clock of all waits, in seconds.
        observers: Called with each entry of the journal.
        runtime: A folder for sockets, removed at the end.
    """

    def __init__(self, config: Config, directory: RunDirectory, display: ProgressDisplay, stop: StopRequest) -> None:
        self.config, self.directory, self.display = config, directory, display
        self.run_id = directory.run_id()
        self.loop = EventLoop()
        self.stop, self.requests = stop, Requests(directory.requests, stop)
        entries = read_journal(directory.journal)
        self.attempt = max((entry.attempt for entry in entries), default=0)
        self.clock = SteadyClock(max((entry.time for entry in entries), default=0.0))
        self.monotonic: Callable[[], float] = time.monotonic
        self.observers: list[Callable[[Entry], None]] = []
        self._stack = contextlib.ExitStack()
        self._stop_announced = False

    def __enter__(self) -> Session:
        processes.become_subreaper()
        processes.yield_to_others()
        # A rank that exceeds the memory limit must not end the runner and the snapshots as well.
        separate_oom_kills()
        rank = self.config.launch.node_rank
        strays = processes.kill_all(lambda: processes.processes_of_run(self.run_id, rank))
        if strays:
            self.display.message(f"ended {strays} processes that an earlier session of this run had left")
        mark = processes.mark(self.run_id, rank)
        processes.remove_semaphores(mark)
        self._stack.callback(processes.remove_semaphores, mark)
        self._journal = Journal(self.directory.journal, self.clock)
        self._stack.callback(self._close_journal)
        # The name is short, and different for each run.
        mine = hashlib.blake2b(f"{self.run_id}/{rank}".encode(), digest_size=5).digest()
        folder, prefix = short_temporary_folder(), f"runner-{base64.b32encode(mine).decode().lower()}"
        for left in Path(folder).glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        runtime = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
        self.runtime = Path(self._stack.enter_context(runtime))
        self._stack.callback(self.loop.close)
        self.loop.wake_by_signals()
        self.requests.count_signals()
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

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close_journal(self) -> None:
        self._journal.close()
        if not self._journal.is_complete:
            print(
                f"runner: warning: the end of {self.directory.journal} could not be written ({self._journal.error}); "
                "runner status will not know how this run ended",
                file=sys.stderr,
            )

    def record(self, event: Event) -> None:
        """Append an event to the journal, and show it to the observers, which must not take long."""
        entry = self._journal.append(event, self.attempt)
        for observe in self.observers:
            observe(entry)

    def announce_stop(self, pass_on: Callable[[str], None] = lambda reason: None, *, saves: bool = True) -> None:
        """Record and print a stop request, once.

        Args:
            pass_on: Called with its reason.
            saves: Whether the ranks save before they exit.
        """
        if not self.stop or self._stop_announced:
            return
        self._stop_announced = True
        self.record(StopRequested(reason=self.stop.reason))
        self.display.message(f"stop requested ({self.stop.reason}): {STOP_TEXT if saves else UNSAVED_STOP_TEXT}")
        pass_on(self.stop.reason)

    def pass_on_save(self, save: Callable[[], int], *, saves: bool) -> None:
        """Pass on a request for a checkpoint, if there was one.

        Args:
            save: Has the ranks make it; returns the last step that has ended.
            saves: Whether the ranks save at all.
        """
        if not (source := self.requests.take_save()):
            return
        self.record(SaveRequested(source=source, step=save(), saves=saves))
        follows = "it is made at the next step" if saves else "but nothing of this program is saved so far"
        self.display.message(f"checkpoint requested ({source}): {follows}")

    def sleep(self, seconds: float) -> None:
        """Wait until the time has passed or a stop is requested."""
        self.loop.pump_until(lambda: bool(self.stop), self.monotonic() + seconds)

    def _on_notice(self, notice: Notice) -> None:
        left = round(notice.seconds_left, 1) if notice.seconds_left is not None else None
        if notice.is_old:
            self.display.message(f"{notice.source}: {notice.what}: posted before this runner started; continuing")
            return
        self.record(PreemptionNotice(source=notice.source, what=notice.what, seconds_left=left))
        self.stop.ask(f"{notice.source}: {notice.what}")
