"""Shared parts of the benchmarks: the machine's description, stolen processor time, medians, outputs, peers' venvs."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

import psutil

from runner.system import processes

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "benchmarks"
# A measurement is repeated where other virtual machines took more than this share of the processor time it wanted.
MAX_STOLEN = 0.1

T = TypeVar("T")


class Progress:
    """Print lines that begin with the seconds since the start."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._began, self._stream = time.monotonic(), stream

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", file=self._stream, flush=True)


# -- measuring -----------------------------------------------------------------------------------------------------


def cpu_times() -> tuple[int, int]:
    """Return the ticks that the hypervisor gave to others while this machine had work, and all that it wanted.

    See proc_stat(5).
    """
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, stolen = fields
    return stolen, user + nice + system + irq + softirq + stolen


def undisturbed(run: Callable[[], T], what: str, *, tries: int, say: Callable[[str], None], touch_bytes: int = 0) -> T:
    """Measure until other virtual machines left the processors alone meanwhile; at most `tries` times.

    Args:
        run: The measurement.
        what: Its name, for the message about a repetition.
        tries: The last one counts in any case.
        say: Prints a message.
        touch_bytes: Memory to touch before each; see `touch_memory`.

    Returns:
        The result of the last measurement.
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
        say(f"{what}: other virtual machines took {share:.0%} of the processor time")
    return result


def touch_memory(nbytes: int) -> None:
    """Allocate memory in a process of its own and free it.

    The host of a virtual machine backs a page at its first touch: the first variant that needs a gigabyte would pay
    for all of them.
    """
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE"
    program = f"import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), flags={flags})"
    subprocess.run([sys.executable, "-c", program, str(nbytes)], check=True)


def flush_and_drop(paths: Iterable[Path]) -> None:
    """Write files to the disk and remove them from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder; at the end it is removed, and what was written is flushed before the next measurement."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()


def end_by_signals() -> None:
    """Have a signal to this process end it through its exit handlers, and adopt what its trainings leave behind.

    The trainings have sessions of their own, which the signal does not reach.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    processes.become_subreaper()


# -- describing ----------------------------------------------------------------------------------------------------


def machine() -> str:
    """Describe the machine.

    With the processor's family and model number: a hypervisor may give different processors one name.
    """
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    processor: dict[str, str] = {}
    for key, _, value in lines:
        processor.setdefault(key.strip(), value.strip())
    name = processor.get("model name", platform.machine())
    if {"cpu family", "model"} <= processor.keys():
        name += f" (family {processor['cpu family']}, model {processor['model']})"
    memory = psutil.virtual_memory().total / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median and, from three values on, the quartiles."""
    if not values:
        return "-"
    if len(values) < 3:
        return f"{statistics.median(values):.{digits}f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}…{high:.{digits}f})"


# -- options and outputs -------------------------------------------------------------------------------------------


def _folder(text: str) -> Path:
    """Return the folder of that name, made if it does not exist: hours of measurement must not end without a page."""
    folder = Path(text)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_parser(description: str | None, page: str, *, quick: str, smoke: str) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have.

    Args:
        description: The benchmark's docstring.
        page: Name of its page.
        quick: What `--quick` reduces.
        smoke: What `--smoke` reduces.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=quick)
    size.add_argument("--smoke", action="store_true", help=f"run every stage once, the figures mean nothing: {smoke}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--docs",
        type=_folder,
        nargs="?",
        const=DOCS,
        metavar="FOLDER",
        help=f"write {page} to this folder (default: docs/benchmarks)",
    )
    return parser


def pair_count(text: str) -> int:
    """Return a number of pairs, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def command_line(script: str) -> str:
    """Return the command that started this benchmark, for its page."""
    return " ".join(["python", f"scripts/bench/{script}", *sys.argv[1:]])


def today() -> str:
    return datetime.date.today().isoformat()


def write_figures(path: Path | None, figures: Mapping[str, float]) -> None:
    """Write the figures as JSON, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


# -- peers ---------------------------------------------------------------------------------------------------------


def make_venv(folder: Path, packages: Sequence[str], what: str) -> None:
    """Make a virtual environment on first use, for a peer whose pins differ from this project's."""
    if (folder / "ready").exists():
        return
    print(f"first use: installing {what} into {folder.relative_to(ROOT)} (some minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)
    (folder / "ready").touch()


def set_affinity(pid: int, cores: Iterable[int]) -> None:
    """Move all threads of a process to these cores."""
    cores = set(cores)
    for thread in psutil.Process(pid).threads():
        # It may have ended since it was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)
