"""Numbers, health and links of the GPUs."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator

from runner.doctor.findings import Finding, fail, ok, warn
from runner.system.gpus import number, query, run, visible

# What nvidia-smi prints instead of a value for a card that hangs or needs a reset. "[N/A]" and "[Not Supported]" only
# mean that the card lacks the feature.
_SICK = re.compile(r"\[?(GPU requires reset|Unknown Error|GPU is lost)\]?|ERR!")
# Share of memory from which a card counts as used by other processes.
_BUSY_SHARE = 0.05

FASTEST_LINK = "NVLink"
# How two GPUs are connected, best first (nvidia-smi topo -m).
LINKS = {
    "NV": FASTEST_LINK,
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe",
    "NODE": "PCIe",
    "SYS": "PCIe and the link between the processors",
}


def check_devices(num_ranks: int, links: Counter[str] | None = None) -> Iterator[Finding]:
    """Check number, health and links of the GPUs.

    Args:
        num_ranks: Number of ranks on this node.
        links: What `links_between_gpus` has returned; None asks the driver.
    """
    try:
        rows = visible(query())
    except subprocess.CalledProcessError as error:
        text = " ".join((error.stdout or error.stderr or "").split())
        yield fail("GPUs", f"the driver does not answer: {text[:200]}", "reinstall the driver, or use another node")
        return
    if not rows:
        yield ok("GPUs", "none; ranks train on the CPU, over gloo")
        return
    kinds = Counter(row["name"] for row in rows)
    listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    yield ok("GPUs", f"{listed}, driver {rows[0]['driver_version']}")
    if len(kinds) > 1:
        yield warn("GPUs", "models differ: every step takes as long as the slowest GPU", "use GPUs of one model")
    if num_ranks > len(rows):
        yield fail("GPUs", f"{num_ranks} ranks for {len(rows)} GPUs", f"pass --nproc-per-node {len(rows)} or auto")
    for row in rows:
        yield from _health(row)
    if len(rows) > 1:
        yield from topology(links_between_gpus() if links is None else links)


def _health(row: dict[str, str]) -> Iterator[Finding]:
    subject = f"GPU {row['index']}"
    sick = next((value for value in row.values() if _SICK.fullmatch(value)), None)
    if sick is not None:
        yield fail(subject, f"the driver reports {sick.strip('[]')!r}", "reset the GPU, or use another node")
    if row["mig.mode.current"] == "Enabled":
        text = "MIG is enabled: CUDA gives a process one slice, and slices cannot share an NCCL communicator"
        yield warn(subject, text, "run one rank per slice (--nproc-per-node 1), or disable MIG")
    errors = number(row["ecc.errors.uncorrected.volatile.total"])
    if errors:
        yield fail(subject, f"{errors} uncorrected ECC errors since the last reset", "use another node")
    total, used = number(row["memory.total"]), number(row["memory.used"])
    if total and used > _BUSY_SHARE * total:
        text = f"{used / 1024:.1f} of {total / 1024:.1f} GiB is already in use"
        yield warn(subject, text, "stop the processes that nvidia-smi lists")
    width, widest = number(row["pcie.link.width.current"]), number(row["pcie.link.width.max"])
    if 0 < width < widest:
        # An idle card lowers its PCIe generation, so only the width indicates a bad slot.
        yield warn(subject, f"PCIe runs at x{width} of x{widest}", "reseat the card, or use another node")
    if row["clocks_throttle_reasons.hw_thermal_slowdown"] == "Active":
        yield warn(subject, "throttled because it is too hot", "check its cooling, or use another node")


def links_between_gpus() -> Counter[str]:
    """Return the number of pairs of this node's GPUs, by how they are connected, as far as the driver says."""
    try:
        return links_in(run("nvidia-smi", "topo", "-m"))
    except subprocess.CalledProcessError:
        return Counter()


def links_in(text: str) -> Counter[str]:
    """Count pairs of GPUs by how they are connected.

    Args:
        text: The matrix of `nvidia-smi topo -m`, in which columns of network cards and affinities follow the GPUs.
    """
    plain = (re.sub(r"\x1b?\[[0-9;]*m", "", line).split() for line in text.splitlines())
    # The header may begin with GPU0, too, but another GPU follows it.
    rows = [line for line in plain if re.match(r"GPU\d+ (?!GPU)", " ".join(line[:2]))]
    links: Counter[str] = Counter()
    for row, cells in enumerate(rows):
        for cell in cells[row + 2 : len(rows) + 1]:
            link = next((name for name in LINKS if re.fullmatch(rf"{name}\d*", cell)), None)
            if link is None:
                break
            links[LINKS[link]] += 1
    return links


def topology(links: Counter[str]) -> Iterator[Finding]:
    """Judge the links between GPUs."""
    if links:
        pairs = ", ".join(f"{count} pair{'s' * (count > 1)} by {name}" for name, count in links.most_common())
        yield ok("topology", pairs)
        if FASTEST_LINK in links and len(links) > 1:
            yield warn(
                "topology",
                f"GPUs are connected unevenly: {pairs}",
                "request all GPUs of a node, or GPUs that share NVLink",
            )
