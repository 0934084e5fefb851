"""Ranks as torchrun starts them, forked from a process that has loaded the libraries once.

A fresh interpreter takes six seconds of processor time for torch, transformers and TRL, which is more than most
trainings of these tests. What the ranks do is the same: processes of their own, real process groups, real signals.
torchrun itself is used where it is what a test is about.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy

from infra.ports import free_port

_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.smollm3.modeling_smollm3",
    "trl.trainer.sft_trainer",
]
# Read by libraries while they are loaded.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
# From SIGTERM to SIGKILL for the other ranks of a node on which one has failed.
_GRACE_S = 30
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """How ranks have ended.

    Attributes:
        codes: Exit code of each; negative for a signal.
        stdout: Of all of them.
        stderr: Of all of them.
    """

    codes: tuple[int, ...]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """0 if all have succeeded, otherwise 1, as torchrun's."""
        return int(any(self.codes))

    def printed(self) -> Any:
        """Return the JSON object that one of them has printed; libraries print lines of their own."""
        return next(json.loads(line) for line in self.stdout.splitlines() if line.startswith('{"'))


def torchrun(
    script: Path,
    *arguments: object,
    ranks: int,
    nodes: int = 1,
    alone: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> Ended:
    """Run a script in ranks, and wait for them.

    Args:
        script: Path of the script.
        arguments: Its arguments.
        ranks: Number of ranks of each node.
        nodes: Number of nodes, which are all on this machine.
        alone: Start a single process as `python` does, without torchrun's variables.
        environment: Variables besides those of this process.
        timeout_s: After so long, they are killed.

    Raises:
        TimeoutError: They were.
    """
    inherited = {**os.environ, **_ENVIRONMENT, **(environment or {})}
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "tests"}
    common |= {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": str(nodes)}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        deadline = time.monotonic() + timeout_s
        processes: list[Any] = []
        try:
            for rank in range(nodes * ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks), "GROUP_RANK": str(rank // ranks)}
                variables = inherited if alone else {**inherited, **common, **own}
                output = str(Path(folder, str(rank)))
                given = (str(script), [str(one) for one in arguments], variables, str(Path.cwd()), output)
                processes.append(_context().Process(target=_run_rank, args=given))
                # The file that these tests were started by is not for the ranks to import.
                with mock.patch.object(sys.modules["__main__"], "__file__", None, create=True):
                    processes[-1].start()
            if not _wait(processes, ranks, deadline) or not _are_closed(Path(folder), deadline):
                raise TimeoutError(f"{script} ran for more than {timeout_s} s:\n{_read(folder, 'stderr')[-8000:]}")
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        codes = tuple(int(process.exitcode) for process in processes)
        ended = Ended(codes, _read(folder, "stdout"), _read(folder, "stderr"))
        assert "please report it" not in ended.stderr, ended.stderr[-8000:]
        return ended


def _read(folder: str, stream: str) -> str:
    paths = sorted(Path(folder).glob(f"*.{stream}"), key=lambda path: int(path.stem))
    return "".join(path.read_text(errors="replace") for path in paths)


def _are_closed(folder: Path, deadline: float) -> bool:
    """Wait until what the ranks have started, which writes to the same files, has ended; return whether it has in time.

    As the end of a pipe would show it: an agent that outlives its rank may still commit.
    """
    for path in folder.glob("*.stderr"):
        with path.open() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0.01)
    return True


def _wait(processes: list[Any], per_node: int, deadline: float) -> bool:
    """Wait for ranks, of which none outlives a failed one of its node for long; return whether they ended in time."""
    now, kill_at = time.monotonic(), dict[int, float]()
    while left := [process for process in processes if process.exitcode is None]:
        if now >= deadline:
            return False
        wait([process.sentinel for process in left], min([deadline, *kill_at.values()]) - now)
        now = time.monotonic()
        for number in range(0, len(processes), per_node):
            node = processes[number : number + per_node]
            if number not in kill_at and any(process.exitcode for process in node):
                kill_at[number] = now + _GRACE_S
                for process in node:
                    process.terminate()
            elif kill_at.get(number, now + 1) <= now:
                kill_at[number] = deadline
                for process in node:
                    process.kill()
    return True


@functools.cache
def _context() -> ForkServerContext:
    """Start the process that ranks are forked from; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def _run_rank(script: str, arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{output}.{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    # Held by every process that has this output, which the children inherit.
    fcntl.flock(2, fcntl.LOCK_SH)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # All forks have the same state of numpy's generator, and fresh interpreters have not.
    numpy.random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # For workers of data loaders; now it is the one by which this process was started.
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        # As at the end of an interpreter; multiprocessing leaves out exit functions, and files that are still open.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for file in [one for one in gc.get_objects() if type(one) in (io.TextIOWrapper, io.BufferedWriter)]:
            with contextlib.suppress(ValueError, OSError):
                file.flush()
