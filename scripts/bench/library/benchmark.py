"""What every benchmark has: its options, how much it measures, and where its figures and its page go."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from runner.system import processes

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "scripts" / "bench"
DOCS = ROOT / "docs" / "benchmarks"
KEPT = "<!-- What follows stays when the benchmark writes this page. -->"

S = TypeVar("S")


class Benchmark:
    """One benchmark's command line, its figures and its page. `quick` and `smoke` are what these options reduce."""

    def __init__(self, name: str, description: str | None, *, quick: str, smoke: str) -> None:
        self.name, self._began = name, time.monotonic()
        self.parser = argparse.ArgumentParser(
            prog=f"scripts/bench/{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        size = self.parser.add_mutually_exclusive_group()
        size.add_argument("--quick", action="store_true", help=quick)
        size.add_argument(
            "--smoke", action="store_true", help=f"run every stage once, the figures mean nothing: {smoke}"
        )
        self.parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
        self.parser.add_argument(
            "--docs",
            type=_folder,
            nargs="?",
            const=DOCS,
            metavar="FOLDER",
            help=f"write {name}.md to this folder (default: docs/benchmarks)",
        )

    def say(self, text: str) -> None:
        """Print a line that begins with the seconds since the start."""
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", flush=True)

    def add_count(self, option: str, default: Any = None, what: str = "", **more: Any) -> None:
        """Add an option whose value is a number of at least 1."""
        text = "; ".join(filter(None, [what, f"default: {default}" if default is not None else ""]))
        self.parser.add_argument(option, type=_at_least_one, default=default, help=text, **more)

    def add_scratch(self, what: str = "for the runs", default: Path | None = None) -> None:
        text = f"folder {what}; default: {default or 'the temporary folder'}"
        self.parser.add_argument("--scratch", type=Path, default=default, help=text)

    def add_seed(self, what: str, default: int = 0) -> None:
        self.parser.add_argument("--seed", type=int, default=default, help=f"{what}; default: {default}")

    def parse(self) -> argparse.Namespace:
        """Read the command line; from here on a signal ends this process in order."""
        self._options = self.parser.parse_args()
        end_by_signals()
        return self._options

    def scale(self, full: S, quick: S, smoke: S) -> S:
        """Return how much is to be measured."""
        return smoke if self._options.smoke else quick if self._options.quick else full

    def publish(self, title: str, circumstances: str, figures: Mapping[str, float], tables: str) -> None:
        """Print the tables; write the figures and the page where they were asked for.

        How it is measured, and what else a page says behind `KEPT`, stays as it is in `docs/benchmarks`.
        """
        print(f"\n{machine()}\n\n{tables}")
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(figures, indent=2) + "\n")
        if self._options.docs is not None:
            page = f"{self.name}.md"
            command = " ".join(["python", f"scripts/bench/{self.name}", *sys.argv[1:]])
            head = f"`{command}`, {datetime.date.today()}, on {machine()}; {circumstances}"
            _, mark, kept = (DOCS / page).read_text().partition(KEPT)
            (self._options.docs / page).write_text(f"# {title}\n\n{head}\n\n{tables}\n\n{mark}{kept}")


def _folder(text: str) -> Path:
    """Return the folder of that name, made if it does not exist: hours of measurement must not end without a page."""
    folder = Path(text)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def end_by_signals() -> None:
    """Have a signal to this process end it through its exit handlers, and adopt what its trainings leave behind.

    The trainings have sessions of their own, which the signal does not reach.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    processes.become_subreaper()


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
