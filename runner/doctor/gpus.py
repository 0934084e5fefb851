"""Numbers, health and links of the GPUs."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator

from runner.doctor.findings import Finding, fail, ok, warn
from runner.hardware.gpus import number, query, run, visible

# In place of a value, of a card that hangs or is to be reset; "[N/A]" and "[Not Supported]" are what it does not have.
_SICK = re.compile(r"\[?(GPU requires reset|Unknown Error|GPU is lost)\]?|ERR!")
# Somebody else's, or a process that was left over.
_BUSY_SHARE = 0.05

# How two GPUs are joined, best first (nvidia-smi topo -m).
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe",
    "NODE": "PCIe",
    "SYS": "PCIe and the processors' own link",
}


def check_devices(num_ranks: int) -> Iterator[Finding]:
    """Numbers, health and links of the GPUs."""
    try:
        rows = visible(query())
    except subprocess.CalledProcessError as error:
        text = " ".join((error.stdout or error.stderr or "").split())
        yield fail("GPUs", f"the driver does not answer: {text[:200]}", "reinstall it, or use another machine")
        return
    if not rows:
        yield ok("GPUs", "none: ranks train on the CPU, over gloo")
        return
    kinds = Counter(row["name"] for row in rows)
    listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    yield ok("GPUs", f"{listed}, driver {rows[0]['driver_version']}")
    if len(kinds) > 1:
        yield warn("GPUs", "they are not equal: the slowest one sets the pace", "use equal ones")
    if num_ranks > len(rows):
        yield fail("GPUs", f"{num_ranks} ranks for {len(rows)} GPUs", f"--nproc-per-node {len(rows)}, or auto")
    for row in rows:
        yield from _health(row)
    if len(rows) > 1:
        yield from topology(run("nvidia-smi", "topo", "-m"))


def _health(row: dict[str, str]) -> Iterator[Finding]:
    subject = f"GPU {row['index']}"
    sick = next((value for value in row.values() if _SICK.fullmatch(value)), None)
    if sick is not None:
        yield fail(subject, f"the driver says {sick.strip('[]')!r}", "reset it, or start the run on another machine")
    if row["mig.mode.current"] == "Enabled":
        text = "MIG is on: CUDA gives a process one slice, and slices share no NCCL communicator"
        yield warn(subject, text, "give each slice a run of one rank (--nproc-per-node 1), or switch MIG off")
    errors = number(row["ecc.errors.uncorrected.volatile.total"])
    if errors:
        yield fail(subject, f"{errors} uncorrected ECC errors since it was reset", "start the run on another machine")
    total, used = number(row["memory.total"]), number(row["memory.used"])
    if total and used > _BUSY_SHARE * total:
        text = f"{used / 1024:.1f} of {total / 1024:.1f} GiB is in use already"
        yield warn(subject, text, "end what runs there: nvidia-smi names it")
    width, widest = number(row["pcie.link.width.current"]), number(row["pcie.link.width.max"])
    if 0 < width < widest:
        # The generation falls while it idles, the width does not.
        yield warn(subject, f"PCIe runs at x{width} of x{widest}", "have the card reseated, or use another machine")
    if row["clocks_throttle_reasons.hw_thermal_slowdown"] == "Active":
        yield warn(subject, "too hot: its clock is lowered", "see to its cooling, or use another machine")


def topology(text: str) -> Iterator[Finding]:
    """nvidia-smi's matrix: which GPUs are joined how. Columns of network cards and affinities come behind the GPUs'."""
    plain = (re.sub(r"\x1b?\[[0-9;]*m", "", line).split() for line in text.splitlines())
    # Not the header, which may begin with GPU0 as well.
    rows = [line for line in plain if re.match(r"GPU\d+ (?!GPU)", " ".join(line[:2]))]
    joined: Counter[str] = Counter()
    for row, cells in enumerate(rows):
        for cell in cells[row + 2 : len(rows) + 1]:
            link = next((name for name in _LINKS if re.fullmatch(rf"{name}\d*", cell)), None)
            if link is None:
                break
            joined[_LINKS[link]] += 1
    if joined:
        pairs = ", ".join(f"{count} pair{'s' * (count > 1)} by {name}" for name, count in joined.most_common())
        yield ok("topology", pairs)
        if "NVLink" in joined and len(joined) > 1:
            yield warn("topology", f"not all GPUs are joined alike: {pairs}", "ask for a whole machine, or part of one")
