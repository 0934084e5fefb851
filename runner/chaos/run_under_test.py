"""A training as it is seen from outside: started in a session of its own, watched by its journal, ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

from runner.config.environment import CONFIG_VARIABLES
from runner.journal.journal import JOURNAL_NAME, Event, JournalReader
from runner.system import processes

# In the environment of all processes of a training.
MARK_ENV = "RUNNER_SUBJECT"
POLL_S = 0.02
# From a start to the steps that are waited for: imports, on a machine that others use too.
START_TIMEOUT_S = 240.0
# A process that has been killed needs a moment until it is gone; on a machine that others use too, a long one.
SETTLE_S = 30.0

T = TypeVar("T")


class NeverStarted(SystemExit):
    """A training has not come to the step that was waited for; ends the program, if nobody minds."""


class Subject:
    """The processes and the journal of one training, which may be started again in the same folder.

    A context: it starts the training; leaving it ends whatever is left.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        on_start: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """The training's temporary files lie in `folder`/tmp.

        Args:
            environment: goes before what is inherited.
            on_start: told of the supervisor's pid, before that has children.
        """
        self.folder, self.command, self._on_start = folder, command, on_start
        self.events: list[Event] = []
        self._journal = JournalReader(folder / JOURNAL_NAME)
        self._mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        # A user's own settings (OUTPUT_DIR, BATCH_SIZE, …) would change the job.
        inherited = {name: value for name, value in os.environ.items() if name not in CONFIG_VARIABLES}
        own = {"TMPDIR": str(self.temporary), "TOKENIZERS_PARALLELISM": "false", MARK_ENV: self._mark}
        self._environment = {**inherited, **own, **(environment or {})}
        self._log = (folder / "output.log").open("ab")

    def __enter__(self) -> Subject:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes.kill_all(self.alive)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self._log.close()

    def start(self) -> None:
        """Type the command (again)."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        self._on_start(self.process.pid)

    # -- what it says --------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what its journal has got meanwhile."""
        self.events = self._journal.events()

    def all(self, name: str, *, after: int | None = None) -> list[Event]:
        """Events of a name; with `after`, of later attempts than that."""
        return [e for e in self.events if e["event"] == name and (after is None or e["attempt"] > after)]

    def wait(self, find: Callable[[], T | None], timeout_s: Callable[[], float] | float) -> T | None:
        """What `find` returns as soon as it is something; None after the time, or once the training has ended."""
        began = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            self.refresh()
            found = find()
            limit = timeout_s() if callable(timeout_s) else timeout_s
            if found is not None or ended or time.monotonic() - began > limit:
                return found
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, *, after: int | None = None) -> Event:
        """The first finished step from this one on.

        Raises:
            NeverStarted: it has not got there in time, or has ended.
        """
        event = self.wait(
            lambda: next((e for e in self.all("log", after=after) if e["step"] >= step), None), START_TIMEOUT_S
        )
        if event is None:
            raise NeverStarted(f"{' '.join(self.command)} has not reached step {step}:\n{self.tail(3000)}")
        return event

    def tail(self, length: int = 300) -> str:
        """The end of its output."""
        return (self.folder / "output.log").read_bytes()[-length:].decode(errors="replace")

    # -- its processes -------------------------------------------------------------------------------------------

    def rank(self, rank: int) -> psutil.Process | None:
        """A rank of the newest process group."""
        pids = [e["pid"] for e in self.all("rank_started") if e["rank"] == rank]
        return _process(pids[-1]) if pids else None

    def helper(self, module: str) -> psutil.Process | None:
        """The supervisor's own child that runs a module."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        return child
        return None

    def alive(self) -> list[psutil.Process]:
        """All its living processes: by the mark in their environment, by the run's id, and by descent from us.

        We are the subreaper of what it leaves, and run one training at a time.
        """
        found = {process.pid: process for process in processes.descendants()}
        marker = f"{MARK_ENV}={self._mark}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[pid] = psutil.Process(pid)
        run_ids = [event["run_id"] for event in self.all("run_started") if "run_id" in event]
        for process in processes.processes_of_run(run_ids[-1], 0) if run_ids else ():
            found[process.pid] = process
        return [process for process in found.values() if _lives(process)]

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that its processes have mapped: their semaphores, for example."""
        found = set()
        for process in self.alive():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {Path(line.split(None, 5)[5]) for line in maps.splitlines() if " /dev/shm/" in line}
        return {path for path in found if not path.name.endswith(" (deleted)")}

    def stop(self, timeout_s: float) -> tuple[int | None, float]:
        """SIGTERM; its exit code (None: it did not end) and the seconds that it took."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            began = time.perf_counter()
            self.process.send_signal(signal.SIGTERM)
            select.select([pidfd], [], [], timeout_s)
            seconds = time.perf_counter() - began
        finally:
            os.close(pidfd)
        # It is reaped here; the supervisor's own end is no orphan.
        code = self.process.poll()
        self.refresh()
        return code, seconds

    def leftovers(self, settle_s: float = SETTLE_S) -> list[str]:
        """What lives of it so long after its end."""
        deadline = time.monotonic() + settle_s
        while (living := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        processes.reap_strays({self.process.pid})
        return [_describe(process) for process in living]


def runner_command(folder: Path, *options: str, script: Sequence[str] = ()) -> list[str]:
    """`runner start` of this environment."""
    runner = str(Path(sys.executable).with_name("runner"))
    return [runner, "start", "--output-dir", str(folder), *options, *script]


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if _lives(process) else None
    return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
