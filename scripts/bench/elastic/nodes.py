"""Three nodes, which are process trees of this machine, under `runner start` or torchrun."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from library.benchmark import BENCH
from library.training_run import start_command
from library.workers import SHARED_STORE_OFF, TORCHRUN, WITHOUT_GPU, free_port

from checkpointing.agent.events import Fetched, Log, Resumed
from runner.chaos.network import address_of, inside
from runner.journal.events import AttemptStarted
from runner.journal.journal import JournalReader, read_journal
from runner.journal.ledger import led_sessions
from runner.journal.run_directory import RunDirectory

OURS = "ours"
METHODS = {
    OURS: "`runner start --nnodes 2:3`",
    "torchrun": "`torchrun --nnodes 2:3 --max-restarts 100`, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    "torchrun_short": "the same with `last_call_timeout=5`",
}
# A shorter last call ends before all agents have stopped their ranks.
SHORT_WAITS = "last_call_timeout=5"
JOB = ("trainer.logging_steps=1", "trainer.num_train_epochs=60", "trainer.save_steps=20")
SNAPSHOTS = ("checkpoint.snapshot_steps=1", "launch.grow_interval_s=0")
LIMIT_S = 120.0
_TURN_S = 0.01


class Step(NamedTuple):
    """A finished step of the journal, with its time in seconds since the epoch."""

    time: float
    step: int


class NoProgressError(Exception):
    """The nodes did not come to a step."""


class Nodes:
    """Three nodes, each with a folder of its own, and a folder for the checkpoints."""

    def __init__(self, method: str, folder: Path, *, in_namespaces: bool) -> None:
        self._method, self._folder, self._in_namespaces = method, folder, in_namespaces
        self._port = free_port()
        self._trees: dict[int, subprocess.Popen[bytes]] = {}
        own = [RunDirectory(str(folder / f"node-{number}"), number) for number in range(3)]
        directories = own if method == OURS else [RunDirectory(str(folder / "run"))]
        self._journals = [JournalReader(directory.journal) for directory in directories]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._trees):
            self.kill(number)

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """Start a node, without anything on its disk."""
        own = self._folder / f"node-{number}"
        shutil.rmtree(own, ignore_errors=True)
        environment = {**os.environ, **WITHOUT_GPU, "GLOO_SOCKET_IFNAME": "eth0" if self._in_namespaces else "lo"}
        if self._method != OURS:
            environment |= SHARED_STORE_OFF
        with (self._folder / f"node-{number}.log").open("ab") as log:
            command = self._command(number, own)
            self._trees[number] = subprocess.Popen(
                inside(number, command) if self._in_namespaces else command,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _command(self, number: int, own: Path) -> list[str]:
        address, leader = (address_of(node) if self._in_namespaces else "127.0.0.1" for node in (number, 0))
        where = ["--nnodes", "2:3", "--nproc-per-node", "1"]
        where += ["--rdzv-endpoint", f"{leader}:{self._port}", "--local-addr", address]
        shared = f"checkpoint.location={self._folder / 'shared'}"
        if self._method == OURS:
            return start_command(own, *where, "--node-rank", str(number), settings=[*JOB, *SNAPSHOTS, shared])
        # All nodes have the endpoint's address here: each would host the store if it came first, and take it along.
        conditions = [f"is_host={number == 0}".lower(), *([SHORT_WAITS] if self._method == "torchrun_short" else [])]
        where += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        script = [str(BENCH / "recovery" / "peer.py"), str(self._folder / "run"), *JOB, shared]
        return [*TORCHRUN, *where, "--rdzv-conf", ",".join(conditions), *script]

    def kill(self, number: int) -> None:
        """Kill a node with all its processes, as the loss of a machine does."""
        tree = self._trees.pop(number)
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(tree.pid)
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
        tree.wait()

    # -- what they report ----------------------------------------------------------------------------------------

    def _steps(self, world_size: int | None = None) -> list[Step]:
        """Return the finished steps, of attempts with so many nodes, as the leaders or torchrun's rank 0 noted them."""
        led = (entry for journal in self._journals for entry in led_sessions(journal.entries()))
        entries = sorted(led, key=lambda entry: entry.time)
        sizes = {entry.attempt: entry.event.nnodes for entry in entries if isinstance(entry.event, AttemptStarted)}
        return [
            Step(entry.time, entry.event.step)
            for entry in entries
            if isinstance(entry.event, Log) and world_size in (None, sizes.get(entry.attempt))
        ]

    @property
    def last_step(self) -> int:
        return self._steps()[-1].step

    def wait_for_step(self, step: int, *, world_size: int) -> Step:
        """Wait until so many ranks have finished a step."""
        return self._wait(lambda: next((s for s in self._steps(world_size) if s.step >= step), None), f"step {step}")

    def wait_for_progress(self, since: float, *, world_size: int) -> Step:
        """Wait until so many ranks have finished a step after a moment."""
        what = f"step of {world_size} ranks"
        return self._wait(lambda: next((s for s in self._steps(world_size) if s.time > since), None), what)

    def _wait(self, find: Callable[[], Step | None], what: str) -> Step:
        deadline = time.monotonic() + LIMIT_S
        while (found := find()) is None:
            code = self._trees[min(self._trees)].poll()
            if time.monotonic() > deadline or code is not None:
                logs = (path.read_text()[-2000:] for path in sorted(self._folder.glob("node-*.log")))
                print("\n".join(logs), file=sys.stderr)
                why = f"not within {LIMIT_S:.0f} s" if code is None else f"a node ended with status {code}"
                raise NoProgressError(f"{METHODS[self._method]}: no {what}: {why}")
            time.sleep(_TURN_S)
        return found

    def longest_pause(self, since: float, until: float) -> float:
        """Return the longest time between the ends of two steps, in seconds."""
        times = [step.time for step in self._steps() if step.time <= until]
        ends = [time for time in times if time < since][-1:] + [time for time in times if time >= since]
        return max(after - before for before, after in itertools.pairwise(ends))

    def bytes_from_storage(self, since: float) -> int:
        """Return the bytes of state that were read from storage since a moment: of all that was fetched or resumed."""
        nbytes = 0
        for number in range(3):
            own = self._folder / f"node-{number}"
            for entry in read_journal(RunDirectory(str(own), number).journal):
                event = entry.event
                if entry.time >= since and (
                    isinstance(event, Fetched) or (isinstance(event, Resumed) and event.source != "memory")
                ):
                    files = (self._folder / "shared" / f"checkpoint-{event.step}").glob("*")
                    nbytes += sum(path.stat().st_size for path in files)
        return nbytes
