"""What the benchmarks share: the machine in words, its stolen time, medians, and the peers' environments."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
# A run is repeated where more than this share of the wanted processor time was taken by other virtual machines.
MAX_STOLEN = 0.1

T = TypeVar("T")


def cpu_times() -> tuple[int, int]:
    """Ticks that the hypervisor gave to others while we had work, and of all that we wanted (proc_stat(5))."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, stolen = fields
    return stolen, user + nice + system + irq + softirq + stolen


def undisturbed(run: Callable[[], T], what: str, *, tries: int, say: Callable[[str], None], touch_bytes: int = 0) -> T:
    """A run during which other virtual machines have not taken the processors away; else the last of `tries`.

    Args:
        touch_bytes: see `touch_memory`; before each.
    """
    for _ in range(tries):
        if touch_bytes:
            touch_memory(touch_bytes)
        before = cpu_times()
        result = run()
        stolen, wanted = (after - start for after, start in zip(cpu_times(), before, strict=True))
        share = stolen / max(wanted, 1)
        if share <= MAX_STOLEN:
            break
        say(f"{what}: {share:.0%} of the processors' time went to other machines")
    return result


def make_venv(folder: Path, packages: Sequence[str], what: str) -> None:
    """Peers pin what we do not: each lives in an environment of its own, made on first use."""
    if (folder / "ready").exists():
        return
    print(f"first use: installing {what} into {folder.relative_to(ROOT)} (some minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)
    (folder / "ready").touch()


def machine() -> str:
    """The machine in words."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, Linux {platform.release()}"
    )


def spread(values: list[float], digits: int = 2) -> str:
    """Median and quartiles."""
    if not values:
        return "-"
    if len(values) < 3:
        return f"{statistics.median(values):.{digits}f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}…{high:.{digits}f})"


def touch_memory(nbytes: int) -> None:
    """Have this machine's free memory be there.

    The first touch of a page of a virtual machine takes its host's time: who needs a gigabyte first would pay for all.
    """
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE"
    program = f"import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), flags={flags})"
    subprocess.run([sys.executable, "-c", program, str(nbytes)], check=True)
