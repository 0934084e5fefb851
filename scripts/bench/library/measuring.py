"""Measuring on a machine that is shared: stolen processor time, the page cache, peaks of memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

# A measurement is repeated where other virtual machines took more than this share of the processor time it wanted.
MAX_STOLEN = 0.1

T = TypeVar("T")


def cpu_times() -> tuple[int, int]:
    """Return the ticks that others had while this machine had work, and all that it wanted: proc_stat(5)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, stolen = fields
    return stolen, user + nice + system + irq + softirq + stolen


def undisturbed(run: Callable[[], T], what: str, *, tries: int, say: Callable[[str], None], touch_bytes: int = 0) -> T:
    """Measure until other virtual machines left the processors alone meanwhile; the last try counts anyway."""
    for _ in range(tries):
        if touch_bytes:
            touch_memory(touch_bytes)
        before = cpu_times()
        result = run()
        stolen, wanted = (after - start for after, start in zip(cpu_times(), before, strict=True))
        share = stolen / max(wanted, 1)
        if share <= MAX_STOLEN:
            break
        say(f"{what}: other virtual machines took {share:.0%} of the processor time")
    return result


def touch_memory(nbytes: int) -> None:
    """Allocate memory in a process of its own and free it.

    The host of a virtual machine backs a page at its first touch: the first variant that needs a gigabyte would pay
    for all of them.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    program = f"import mmap; mmap.mmap(-1, {nbytes}, flags={flags})"
    subprocess.run([sys.executable, "-c", program], check=True)


def read_all(path: Path) -> None:
    """Read a file, so that it is in the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(4 << 20):
            pass


def flush_and_drop(paths: Iterable[Path]) -> None:
    """Write files to the disk and remove them from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder; at the end it is removed, and what was written is flushed before the next measurement."""
    # A short name: a socket's path has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="b-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()


class Peak(threading.Thread):
    """The highest of the values that a function returns from time to time, until the block ends."""

    def __init__(self, read: Callable[[], int], every_s: float) -> None:
        super().__init__(daemon=True)
        self._read, self._every_s, self._ended = read, every_s, threading.Event()
        self.nbytes = 0

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.nbytes = max(self.nbytes, self._read())

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def own_anonymous_bytes() -> int:
    return _status_bytes(os.getpid())[0]


def peak_of_processes(*pids: int) -> Peak:
    """Watch the memory that processes and their children hold: anonymous, and shared (counted once)."""

    def now() -> int:
        held = [(0, 0)]
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                held += [_status_bytes(each.pid) for each in (process, *process.children(recursive=True))]
        return sum(anonymous for anonymous, _ in held) + max(shared for _, shared in held)

    return Peak(now, every_s=0.1)


def _status_bytes(pid: int) -> tuple[int, int]:
    """Return the anonymous and the shared memory of a process; one that has just ended has neither field."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anonymous, shared = (1024 * int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem"))
    return anonymous, shared
