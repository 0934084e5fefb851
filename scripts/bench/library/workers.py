"""Processes that a benchmark starts: each measures one thing and prints one line "RESULT {json}"."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from infra.ports import free_port as free_port

from library.benchmark import BENCH, ROOT

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# With the shared store, not every run of torchrun comes back after a kill.
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# One thread for each rank.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{BENCH}"}
WITHOUT_GPU = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def started(
    command: Iterable[object], log: Path, environment: Mapping[str, str], *, piped: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own, and kill the whole session at the end.

    Its input and output are pipes, or nothing and the log, which has its errors. The environment is added to ours.
    """
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else errors,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            # What an orderly exit would wait for, and what the process has left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def results_in(output: str) -> list[dict[str, Any]]:
    """Return the results in a worker's output; two ranks may share a line."""
    return [json.JSONDecoder().raw_decode(text)[0] for text in output.split("RESULT ")[1:]]


def results_of(
    command: Sequence[object], log: Path, environment: dict[str, str] | None = None, timeout_s: float | None = None
) -> list[dict[str, Any]]:
    """Run a command to its end and return its results; its failure ends the benchmark."""
    with started(command, log, ENVIRONMENT | (environment or {})) as process:
        output, _ = process.communicate(timeout=timeout_s)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{(log.read_text() + output)[-3000:]}")
    return results_in(output)


def set_affinity(pid: int, cores: Iterable[int]) -> None:
    """Move all threads of a process to these cores."""
    cores = set(cores)
    for thread in psutil.Process(pid).threads():
        # It may have ended since it was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)


def make_venv(folder: Path, packages: Sequence[str], what: str) -> None:
    """Make a virtual environment on first use, for a peer whose pins differ from this project's."""
    if (folder / "ready").exists():
        return
    print(f"first use: installing {what} into {folder.relative_to(ROOT)} (some minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)
    (folder / "ready").touch()
