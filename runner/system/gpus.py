"""GPUs as nvidia-smi reports them; without torch and without a CUDA context."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import subprocess
from dataclasses import dataclass

# nvidia-smi --help-query-gpu
_FIELDS = [
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "mig.mode.current",
]
_TIMEOUT_S = 30.0
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Gpu:
    """One GPU, with its index as nvidia-smi counts."""

    index: int
    memory_bytes: int


def find_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA will see; none if the driver is missing or does not answer."""
    with contextlib.suppress(subprocess.CalledProcessError):
        return [Gpu(int(row["index"]), number(row["memory.total"]) * _MIB) for row in visible(query())]
    return []


def visible(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of the GPUs that CUDA will see.

    CUDA_VISIBLE_DEVICES lists them by index or UUID; like CUDA, this stops at the first unknown name.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return rows
    found = []
    for name in names.split(","):
        row = next((r for r in rows if name and (r["index"] == name or r["uuid"].startswith(name))), None)
        if row is None:
            break
        found.append(row)
    return found


def query() -> list[dict[str, str]]:
    """Return the values of each GPU by field, empty for one that this driver does not know; may raise as `run` does."""
    known = list(_FIELDS)
    while True:
        try:
            text = run("nvidia-smi", f"--query-gpu={','.join(known)}", "--format=csv,noheader,nounits")
        except subprocess.CalledProcessError as error:
            unknown = re.search(r'Field "([^"]+)" is not a valid field', f"{error.stdout}{error.stderr}")
            if unknown is None or unknown[1] not in known:
                raise
            known.remove(unknown[1])
            continue
        rows = csv.reader(io.StringIO(text), skipinitialspace=True)
        none = dict.fromkeys(_FIELDS, "")
        return [{**none, **dict(zip(known, row, strict=True))} for row in rows if len(row) == len(known)]


def run(*command: str) -> str:
    """Return what a command prints, nothing if it is missing or too slow; raises CalledProcessError if it failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def number(text: str) -> int:
    """Return a value as an integer; 0 for what the card does not report."""
    return int(text) if text.isdigit() else 0
