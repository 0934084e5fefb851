"""Number, health and links of the GPUs, and whether the links suit the strategy.

Which ranks exchange parameters at each layer, and over what: DDP and ZeRO 1 and 2 exchange gradients once a step, while
the backward pass runs. FSDP and ZeRO 3 gather the parameters of each layer before it runs, forward and backward, and
reduce its gradients: half as much traffic again (S. Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 7), and
computation waits for it.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping

from runner.doctor.findings import Finding, fail, ok, warn
from runner.plan.memory_need import PlannedJob
from runner.system.gpus import number, query, run, visible

# What nvidia-smi prints instead of a value for a card that hangs or needs a reset. "[N/A]" and "[Not Supported]" only
# mean that the card lacks the feature.
_SICK = re.compile(r"\[?(GPU requires reset|Unknown Error|GPU is lost)\]?|ERR!")
# Share of memory from which a card counts as used by other processes.
_BUSY_SHARE = 0.05

# Parameters are gathered for the forward pass and for the backward pass; gradients are reduced.
_PASSES = 3

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
    """Check number, health and links of the GPUs for the ranks of this node.

    Without `links`, the driver is asked for them.
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
    """Count pairs of GPUs by how they are connected, in the matrix of `nvidia-smi topo -m`.

    Columns of network cards and affinities follow the GPUs.
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


def check_mesh(job: PlannedJob, num_parameters: int, links: Mapping[str, int], *, has_rdma: bool) -> Iterator[Finding]:
    """Check the links (see `links_in`) that a sharded model's traffic takes; otherwise there is nothing to check."""
    shards_all = job.strategy in ("fsdp", "fsdp_all_nodes") or job.zero_stage == 3 or job.dp_shard > 1
    if job.ranks == 1 or not job.on_gpu:
        return
    if job.tp > 1:
        yield _check_tensor_parallel(job, links)
    if not shards_all:
        return
    crosses = job.sharing_ranks > job.local_ranks
    traffic = f"each step moves {_PASSES * num_parameters * job.compute_bytes / 1e9:.2f} GB to and from each rank"
    if crosses and not has_rdma:
        yield warn(
            "mesh",
            f"{traffic} between nodes, and this node has no network card for RDMA",
            "use nodes with InfiniBand, RoCE or EFA, or strategy=fsdp, which shards within a node only, if a node can "
            "hold the state (see runner plan)",
        )
    worst = _slowest(links)
    if job.local_ranks == 1 or worst is None:
        return
    if worst == FASTEST_LINK:
        yield ok("mesh", f"{traffic}, within this node over {worst}")
    else:
        yield warn(
            "mesh",
            f"{traffic}, within this node over {worst}",
            "use GPUs with NVLink between all of them, or strategy=ddp or ZeRO 2 if a GPU can hold the model (see "
            "runner plan)",
        )


def _slowest(links: Mapping[str, int]) -> str | None:
    return max(links, key=list(LINKS.values()).index, default=None)


def _check_tensor_parallel(job: PlannedJob, links: Mapping[str, int]) -> Finding:
    """Ranks that compute a layer together exchange its activations four times per layer and micro-batch."""
    worst = _slowest(links)
    text = f"the {job.tp} ranks of a tensor parallel group wait for each other's activations in every layer"
    if worst in (None, FASTEST_LINK):
        return ok("mesh", f"{text}, within this node over {worst or 'links that are not known'}")
    return warn(
        "mesh",
        f"{text}, within this node over {worst}",
        "use GPUs with NVLink between all of them, or dp_shard instead of tp, if a GPU can compute a layer alone",
    )
