"""Runs of the worker, one at a time, and what is measured of them from outside."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from library.agent import MonitoredAgent
from library.benchmark import ROOT
from library.measuring import flush_and_drop, peak_of_processes, read_all, scratch_folder
from library.orders import order
from library.workers import ENVIRONMENT, results_in, set_affinity, started

WORKER = Path(__file__).with_name("worker.py")
DLROVER_VENV = ROOT / ".bench" / "dlrover"
SLOW_DISK_BYTES_PER_S = 20_000_000
# Saves of the runs on a slow disk.
SLOW_SAVE_EVERY = 4


@contextlib.contextmanager
def throttled(pid: int | None) -> Iterator[bool]:
    """Limit a process's writes to the disk by the kernel (blkio cgroup); yields False where that is not possible."""
    group = Path(f"/sys/fs/cgroup/blkio/checkpoint-bench-{os.getpid()}")
    is_limited = False
    with contextlib.suppress(OSError):
        if pid is not None:
            group.mkdir()
            device = Path(tempfile.gettempdir()).stat().st_dev
            rule = f"{os.major(device)}:{os.minor(device)} {SLOW_DISK_BYTES_PER_S}"
            (group / "blkio.throttle.write_bps_device").write_text(rule)
            (group / "cgroup.procs").write_text(str(pid))
            is_limited = True
    try:
        yield is_limited
    finally:
        with contextlib.suppress(OSError):
            if is_limited:
                (group.parent / "cgroup.procs").write_text(str(pid))
            group.rmdir()


class CheckpointRuns:
    """Runs workers one at a time, in a scratch folder on the disk under test."""

    def __init__(self, scratch: Path, *, shape: dict[str, int], small_shape: dict[str, int]) -> None:
        self.scratch, self.shape, self.small_shape = scratch, shape, small_shape

    def work(
        self,
        method: str,
        folder: Path,
        *,
        core: int | None = None,
        agent: MonitoredAgent | None = None,
        throttle: bool = False,
        **how: Any,
    ) -> dict[str, Any]:
        """Run the worker once, on a core or anywhere, with `how` its arguments besides the shape.

        Returns:
            Its figures, the peak memory of all its processes as `peak_bytes`, and whether its agent was `throttled`.
        """
        python = DLROVER_VENV / "bin" / "python" if method == "dlrover" else Path(sys.executable)
        command = ["taskset", "-c", core] if core is not None else []
        command += [python, *order(WORKER, "train", method=method, folder=folder, **{**self.shape, **how})]
        environment, pids = ENVIRONMENT, []
        if agent is not None:
            environment = ENVIRONMENT | agent.environment(attempt=time.monotonic_ns() // 1_000_000)
            pids = [agent.pid]
            if core is not None:
                set_affinity(agent.pid, [core])
        log = self.scratch / "worker.log"
        with started(command, log, environment) as process:
            assert process.stdin is not None and process.stdout is not None
            if any(line.startswith("READY") for line in process.stdout):
                peak = peak_of_processes(process.pid, *pids)
                with throttled(agent.pid if throttle and agent is not None else None) as limited, peak:
                    process.stdin.write("\n")
                    process.stdin.flush()
                    answer = next((line for line in process.stdout if line.startswith("RESULT ")), None)
                if answer is not None:
                    return {**results_in(answer)[0], "peak_bytes": peak.nbytes, "throttled": limited}
        raise SystemExit(f"{method} failed:\n{log.read_text()[-3000:]}")

    def run(self, method: str, **how: Any) -> dict[str, Any]:
        """Run one variant from scratch; what it wrote is removed and flushed before the next."""
        with scratch_folder(self.scratch) as folder:
            if method != "ours":
                return self.work(method, folder, **how)
            with MonitoredAgent(str(folder)) as agent:
                result = self.work(method, folder, agent=agent, **how)
        committed = agent.committed_at
        durable_s = [committed[step] - began for step, began in result["began_at"] if step in committed]
        return {**result, "durable_s": durable_s}

    def dd(self, nbytes: int, *flags: str) -> float:
        """Return the seconds that `dd` takes to write a state's bytes, read from the page cache."""
        source, target = self.scratch / "source", self.scratch / "target"
        if not source.exists():
            with source.open("wb") as file:
                for _ in range(nbytes // (4 << 20)):
                    file.write(os.urandom(4 << 20))
        read_all(source)
        os.sync()
        began = time.perf_counter()
        subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", *flags], check=True, capture_output=True)
        seconds = time.perf_counter() - began
        target.unlink()
        return seconds

    def resume_pair(self) -> tuple[float, float]:
        """Return the seconds of `CheckpointManager.resume()`: from memory, and from the disk with its cache dropped."""
        with scratch_folder(self.scratch) as folder:
            with MonitoredAgent(str(folder)) as agent:
                self.work("ours", folder, agent=agent, steps=1, save_every=1)
                from_memory = self.work("ours", folder, agent=agent, steps=0)
            flush_and_drop(folder.glob("checkpoint-*/*"))
            with MonitoredAgent(str(folder)) as agent:
                from_disk = self.work("ours", folder, agent=agent, steps=0)
        assert from_memory["start"] == from_disk["start"] == 1
        return from_memory["resume_s"], from_disk["resume_s"]

    def slow_disk_pair(self, *, steps: int) -> tuple[float, float] | None:
        """Return the median seconds of a step with saves to a slow disk, and without; None without a throttle."""
        with scratch_folder(self.scratch) as folder, MonitoredAgent(str(folder)) as agent:
            how: Any = {**self.small_shape, "steps": steps}
            saving = self.work(
                "ours", folder, agent=agent, throttle=True, save_every=SLOW_SAVE_EVERY, finish=False, **how
            )
            # Its last commits would disturb the steps without saves.
            agent.kill()
            plain = self.work("none", folder, **how)
        if not saving["throttled"]:
            return None
        return statistics.median(saving["step_s"]), statistics.median(plain["step_s"])
