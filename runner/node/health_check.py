"""Has the GPUs of this node checked, once, before it takes part in a run of several nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from typing import IO, Any

from checkpointing.host.interpreter import module_command
from runner.errors import GpuFaulty
from runner.system.event_loop import EventLoop, StopRequest
from runner.system.processes import Host

_SOON_S = 0.05
# A GPU that does not answer: loading torch and the driver from a cold disk takes a minute at most.
_TIMEOUT_S = 300.0
_NO_END = "the check did not end"
_WRONG = re.compile(r"computes? (a )?wrong|does not keep")
# Why a check ends early that has nothing to do with GPUs: memory ran out, or a shared volume did not answer.
_NOT_OF_GPUS = re.compile(r"(ImportError|ModuleNotFoundError|OSError|MemoryError)\b")


def start_check(output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `python -m runner.doctor.health`."""
    command = module_command("runner.doctor.health", str(os.getpid()))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)


class HealthCheck:
    """Checks the GPUs in a process of its own, which gives their memory back when it ends.

    `on_fault` is called with what is wrong, before the error is raised. The loop runs meanwhile: other nodes expect
    signs of life.
    """

    def __init__(
        self,
        on_fault: Callable[[str], None],
        *,
        loop: EventLoop,
        stop: StopRequest,
        host: Host,
        start: Callable[[IO[bytes], IO[bytes]], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._on_fault, self._loop, self._stop, self._host = on_fault, loop, stop, host
        self._start = start or start_check
        self._is_done = False

    def run(self) -> None:
        """Check, unless that was done.

        Raises:
            GpuFaulty: A GPU computes or stores wrong values, fails, or does not answer.
        """
        if self._is_done:
            return
        fault = self._check()
        if fault and fault != _NO_END and not _WRONG.search(fault) and not self._stop:
            # What another process had to do with is over a moment later. A wrong result is a verdict.
            fault = self._check()
        if self._stop:
            return
        self._is_done = True
        if fault:
            self._on_fault(fault)
            raise GpuFaulty(f"the GPUs of this node are not used: {fault} (launch.check_gpus)")

    def _check(self) -> str:
        """Return what is wrong; empty if nothing is, or the check was stopped, or has no verdict."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._start(output, errors)
            deadline = self._host.monotonic() + _TIMEOUT_S
            while (status := process.poll()) is None and not self._stop and self._host.monotonic() < deadline:
                self._loop.pump(_SOON_S)
            if status is None:
                process.kill()
                process.wait()
            if self._stop:
                return ""
            return _NO_END if status is None else _fault(status, _text(output), _text(errors))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1_000_000).decode(errors="replace")


def _fault(status: int, output: str, errors: str) -> str:
    """Return what is wrong; empty if all is well."""
    try:
        found: Any = json.loads(output) if status == 0 else None
    except ValueError:
        found = None
    if isinstance(found, list):
        return "; ".join(map(str, found))
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
    if status == -signal.SIGKILL or _NOT_OF_GPUS.match(last):
        return ""
    return f"the check ended with status {status}: {last[:500]}"
