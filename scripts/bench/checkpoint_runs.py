"""Runs of `checkpoint_worker.py`, one at a time, and what is measured of them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, Progress, flush_and_drop, scratch_folder
from monitored_agent import MonitoredAgent, monitored_agent

WORKER = Path(__file__).with_name("checkpoint_worker.py")
DLROVER_VENV = ROOT / ".bench" / "dlrover"
SLOW_DISK_BYTES_PER_S = 20_000_000
# Saves of the runs on a slow disk.
SLOW_SAVE_EVERY = 4


class PeakMemory(threading.Thread):
    """The most memory that processes and their children hold: anonymous, and shared (counted once)."""

    def __init__(self, *pids: int) -> None:
        super().__init__(daemon=True)
        self._pids, self._ended = pids, threading.Event()
        self.nbytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.nbytes = max(self.nbytes, self._now())

    def stop(self) -> int:
        """Stop watching and return the peak in bytes."""
        self._ended.set()
        self.join()
        return self.nbytes

    def _now(self) -> int:
        anonymous, shared = 0, [0]
        for pid in self._pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    fields = dict(
                        line.split(":", 1) for line in Path(f"/proc/{each.pid}/status").read_text().splitlines()
                    )
                    # A process that has just ended has neither field.
                    anonymous += 1024 * int(fields.get("RssAnon", "0").split()[0])
                    shared.append(1024 * int(fields.get("RssShmem", "0").split()[0]))
        return anonymous + max(shared)


@contextlib.contextmanager
def throttled(pid: int | None) -> Iterator[bool]:
    """Limit a process's writes to the disk by the kernel (blkio cgroup); yields False where that is not possible."""
    group = Path(f"/sys/fs/cgroup/blkio/checkpoint-bench-{os.getpid()}")
    if pid is None:
        yield False
        return
    try:
        group.mkdir()
        device = Path(tempfile.gettempdir()).stat().st_dev
        rule = f"{os.major(device)}:{os.minor(device)} {SLOW_DISK_BYTES_PER_S}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
            group.rmdir()


class CheckpointRuns:
    """Runs workers one at a time, in a scratch folder on the disk under test.

    Args:
        scratch: The folder.
        shape: The model's, as options of the worker.
        small_shape: The shape for runs on a slow disk.
        save_every: Steps between saves.
    """

    def __init__(self, scratch: Path, *, shape: dict[str, int], small_shape: dict[str, int], save_every: int) -> None:
        self.scratch, self.shape, self.small_shape, self.save_every = scratch, shape, small_shape, save_every
        self.say = Progress()

    def work(
        self,
        method: str,
        folder: Path,
        shape: dict[str, int],
        *,
        steps: int,
        save_every: int,
        core: int | None = None,
        agent: MonitoredAgent | None = None,
        finish: bool = True,
        throttle: bool = False,
    ) -> dict[str, Any]:
        """Run the worker once.

        Returns:
            Its figures, the peak memory of all its processes as `peak_bytes`, and whether it was `throttled`.
        """
        python = DLROVER_VENV / "bin" / "python" if method == "dlrover" else Path(sys.executable)
        command = [str(python), str(WORKER), method, "--folder", str(folder), "--wait"]
        command += ["--steps", str(steps), "--save-every", str(save_every)]
        command += [part for key, value in shape.items() for part in (f"--{key}", str(value))]
        command += [] if finish else ["--no-finish"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if agent is not None:
            environment |= agent.environment(attempt=time.monotonic_ns() // 1_000_000)
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
            if agent is not None:
                agent.move_to([core])
        log = self.scratch / "worker.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            memory = PeakMemory(process.pid, *([agent.pid] if agent is not None else []))
            try:
                for line in process.stdout:
                    if line.startswith("READY"):
                        with throttled(agent.pid if throttle and agent is not None else None) as limited:
                            memory.start()
                            process.stdin.write("\n")
                            process.stdin.flush()
                            answer = next((line for line in process.stdout if line.startswith("RESULT ")), None)
                        if answer is not None:
                            figures: dict[str, Any] = json.loads(answer.removeprefix("RESULT "))
                            return {**figures, "peak_bytes": memory.stop(), "throttled": limited}
                raise SystemExit(f"{method} failed:\n{log.read_text()[-3000:]}")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self, method: str, *, steps: int, core: int | None) -> dict[str, Any]:
        """Run one variant from scratch; what it wrote is removed and flushed before the next."""
        with scratch_folder(self.scratch) as folder:
            if method != "ours":
                return self.work(method, folder, self.shape, steps=steps, save_every=self.save_every, core=core)
            with monitored_agent(str(folder)) as agent:
                return self.work(
                    method, folder, self.shape, steps=steps, save_every=self.save_every, core=core, agent=agent
                )

    def dd(self, nbytes: int, *flags: str) -> float:
        """Return the seconds that `dd` takes to write a state's bytes, read from the page cache."""
        source, target = self.scratch / "source", self.scratch / "target"
        if not source.exists():
            with source.open("wb") as file:
                for _ in range(nbytes // (4 << 20)):
                    file.write(os.urandom(4 << 20))
        with source.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass
        os.sync()
        began = time.perf_counter()
        subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", *flags], check=True, capture_output=True)
        seconds = time.perf_counter() - began
        target.unlink()
        return seconds

    def resume_pair(self) -> tuple[float, float]:
        """Return the seconds of `CheckpointManager.resume()`: from memory, and from the disk with its cache dropped."""
        with scratch_folder(self.scratch) as folder:
            with monitored_agent(str(folder)) as agent:
                self.work("ours", folder, self.shape, steps=1, save_every=1, agent=agent)
                from_memory = self.work("ours", folder, self.shape, steps=0, save_every=self.save_every, agent=agent)
            flush_and_drop(folder.glob("checkpoint-*/*"))
            with monitored_agent(str(folder)) as agent:
                from_disk = self.work("ours", folder, self.shape, steps=0, save_every=self.save_every, agent=agent)
        assert from_memory["start"] == from_disk["start"] == 1
        return from_memory["resume_s"], from_disk["resume_s"]

    def slow_disk_pair(self, *, steps: int) -> tuple[float, float] | None:
        """Return the median seconds of a step with saves to a slow disk, and without saves.

        None where writes cannot be throttled.
        """
        with scratch_folder(self.scratch) as folder, monitored_agent(str(folder)) as agent:
            saving = self.work(
                "ours",
                folder,
                self.small_shape,
                steps=steps,
                save_every=SLOW_SAVE_EVERY,
                agent=agent,
                finish=False,
                throttle=True,
            )
            # Its last commits would disturb the steps without saves.
            agent.kill()
            plain = self.work("none", folder, self.small_shape, steps=steps, save_every=0)
        if not saving["throttled"]:
            return None
        return statistics.median(saving["step_s"]), statistics.median(plain["step_s"])
