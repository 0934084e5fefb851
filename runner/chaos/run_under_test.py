"""A run as it is seen from outside: started in its own session, observed through its journal, ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from checkpointing.agent.events import Event
from checkpointing.host.environment import REHEARSAL_ENV
from checkpointing.host.interpreter import module_command
from runner.config.load import CONFIG_VARIABLES
from runner.journal.events import Entry, RankStarted, RunStarted
from runner.journal.journal import JOURNAL_NAME, JournalReader
from runner.session.session import short_temporary_folder
from runner.system import processes

# In the environment of all processes of a run.
MARK_ENV = "RUNNER_UNDER_TEST"
POLL_S = 0.02
# A killed process takes a moment to disappear, and long on a busy machine.
SETTLE_S = 30.0

T = TypeVar("T")
E = TypeVar("E", bound=Event)


class RunUnderTest:
    """The processes and the journal of one run, which may be started again in the same folder.

    As a context manager it starts the run, and kills what is left of it at the end. The folder holds its temporary
    files (`tmp`) and its output (`output.log`); `entries` are those of the journal as of the last `refresh`.
    """

    process: subprocess.Popen[bytes]  # The supervisor.

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        on_start: Callable[[int], None] = lambda pid: None,
        journal: Path | None = None,
        alone: bool = True,
    ) -> None:
        """Prepare the run without starting it.

        Args:
            command: Starts the run.
            folder: The run's folder.
            environment: Environment variables that override inherited ones.
            on_start: Called with the supervisor's process id before it has children.
            journal: Its journal; None for the one in its folder.
            alone: Whether this process observes nothing else, so that all its descendants are the run's.
        """
        self.folder, self.command, self._on_start = folder, command, on_start
        self.entries: list[Entry] = []
        self._journal, self._alone = JournalReader(journal or folder / JOURNAL_NAME), alone
        self._mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        # The user's own settings (OUTPUT_DIR, BATCH_SIZE, …) would change the job.
        inherited = {name: value for name, value in os.environ.items() if name not in CONFIG_VARIABLES}
        # Its runner's sockets, where the name of the folder above is too long for them: a killed one leaves them.
        self._sockets = tempfile.TemporaryDirectory(
            prefix="chaos-", dir=short_temporary_folder(), ignore_cleanup_errors=True
        )
        own = {"TMPDIR": str(self.temporary), "XDG_RUNTIME_DIR": self._sockets.name}
        own |= {"TOKENIZERS_PARALLELISM": "false", MARK_ENV: self._mark}
        self._environment = {**inherited, **own, **(environment or {})}
        self._log = (folder / "output.log").open("ab")

    def __enter__(self) -> RunUnderTest:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        processes.kill_all(self.alive)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.close()

    def close(self) -> None:
        """Close its output, and remove what a killed runner has left."""
        self._log.close()
        self._sockets.cleanup()

    def start(self) -> None:
        """Run the command, again if it has ended."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        self._on_start(self.process.pid)

    # -- journal and output ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what was added to the journal."""
        self.entries = self._journal.entries()

    def all(self, kind: type[E], *, after: int | None = None) -> list[E]:
        """Return the events of a kind; with `after`, only those of later attempts."""
        newer = (entry.event for entry in self.entries if after is None or entry.attempt > after)
        return [event for event in newer if isinstance(event, kind)]

    def wait(self, find: Callable[[], T | None], timeout_s: Callable[[], float] | float) -> T | None:
        """Wait until `find`, which is called after each refresh, returns a value other than None, and return it.

        Returns None after the time-out, or once the run has ended.
        """
        began = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            self.refresh()
            found = find()
            limit = timeout_s() if callable(timeout_s) else timeout_s
            if found is not None or ended or time.monotonic() - began > limit:
                return found
            time.sleep(POLL_S)

    def tail(self, length: int = 300) -> str:
        """Return the end of the output, this many bytes."""
        return (self.folder / "output.log").read_bytes()[-length:].decode(errors="replace")

    # -- its processes -------------------------------------------------------------------------------------------

    def rank(self, rank: int | None = None) -> psutil.Process | None:
        """Return a rank of the newest process group (None: the one that reported last), if it is running."""
        pids = [event.pid for event in self.all(RankStarted) if rank in (None, event.rank) and event.pid is not None]
        return _process(pids[-1]) if pids else None

    def helper(self, module: str) -> psutil.Process | None:
        """Return the supervisor's own child that runs a module."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        return child
        return None

    def alive(self) -> list[psutil.Process]:
        """Return all running processes of the run.

        They are found by the mark in their environment, by the run's id, and by descent: this process is the
        subreaper of what the run leaves.
        """
        found = {process.pid: process for process in processes.descendants()} if self._alone else {}
        found |= {process.pid: process for process in self.marked()}
        run_ids = [event.run_id for event in self.all(RunStarted) if event.run_id]
        for process in processes.processes_of_run(run_ids[-1], 0) if run_ids else ():
            found[process.pid] = process
        return [process for process in found.values() if processes.is_running(process)]

    def marked(self) -> list[psutil.Process]:
        """Return the processes that have the mark in their environment."""
        found = []
        marker = f"{MARK_ENV}={self._mark}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(pid))
        return [process for process in found if processes.is_running(process)]

    def shared_memory(self) -> set[Path]:
        """Return the files in /dev/shm that its processes have mapped, such as semaphores."""
        found = set()
        for process in self.alive():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {Path(line.split(None, 5)[5]) for line in maps.splitlines() if " /dev/shm/" in line}
        return {path for path in found if not path.name.endswith(" (deleted)")}

    def leftovers(self, settle_s: float = SETTLE_S) -> list[str]:
        """Return the processes that still run this many seconds after the end, described in words."""
        deadline = time.monotonic() + settle_s
        while (running := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        processes.reap_strays({self.process.pid})
        return [_describe(process) for process in running]


@dataclass(frozen=True)
class JobUnderTest:
    """What is run again and again, each time in a folder of its own.

    Attributes:
        options: Options of `runner start` that describe the job.
        program: The user's own program, as it is typed after them; empty for the configured job.
        length: Of a rehearsal, its steps and the steps between two saves; None for the whole job.
    """

    options: Sequence[str] = ()
    program: Sequence[str] = ()
    length: tuple[int, int] | None = None

    def with_options(self, *options: str) -> JobUnderTest:
        """Return the job with further options."""
        return replace(self, options=(*self.options, *options))

    def with_settings(self, *settings: str) -> JobUnderTest:
        """Return the job with further settings, each as KEY=VALUE."""
        return self.with_options(*(part for setting in settings for part in ("--set", setting)))

    def environment(self, folder: Path) -> dict[str, str]:
        """Return what the environment of a run in a folder has more."""
        if self.length is None:
            return {}
        steps, save_steps = self.length
        return {REHEARSAL_ENV: f"{steps}:{save_steps}:{folder / 'program-output'}"}

    def command(self, folder: Path, *options: str) -> list[str]:
        """Return the command line of a run in a folder."""
        return runner_command(folder, *self.options, *options, script=self.program)


def stored_differences(
    first: tuple[str, str | None],
    second: tuple[str, str | None],
    *flags: str,
    **options: float | None,
) -> list[str]:
    """Return what differs between the last checkpoints of two runs, in words.

    Args:
        first: Location and local tier of the first run's checkpoints.
        second: Those of the second run.
        flags: Of `runner.chaos.compare`, which a process of its own runs, as it loads torch.
        options: Its options with a value; None for one that is not given.
    """
    command = module_command("runner.chaos.compare", json.dumps(first), json.dumps(second), *flags)
    command += [f"--{name}={value}" for name, value in options.items() if value is not None]
    # Of its own, since it is killed where this process is stopped.
    with tempfile.TemporaryDirectory(prefix="chaos-compare-") as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        return [f"the comparison failed: {done.stderr[-1000:]}"]
    return list(json.loads(done.stdout))


def runner_command(folder: Path, *options: str, script: Sequence[str] = ()) -> list[str]:
    """Return the command line of `runner start` in this Python environment."""
    runner = str(Path(sys.executable).with_name("runner"))
    return [runner, "start", "--output-dir", str(folder), *options, *script]


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if processes.is_running(process) else None
    return None


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
