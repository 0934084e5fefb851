"""Whether the links of a machine suit the strategy: which ranks exchange parameters at each layer, and over what.

DDP and ZeRO 1 and 2 exchange gradients once a step, while the backward pass runs. FSDP and ZeRO 3 gather the parameters
of each layer before it runs, forward and backward, and reduce its gradients: half as much traffic again (S. Rajbhandari
et al., "ZeRO", arXiv 1910.02054, section 7), and computation waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.doctor.findings import Finding, ok, warn
from runner.doctor.gpu_checks import FASTEST_LINK, LINKS
from runner.plan.memory_need import PlannedJob

# Gathered for the forward pass and for the backward pass; gradients reduced.
_PASSES = 3


def check_mesh(job: PlannedJob, num_parameters: int, links: Mapping[str, int], *, has_rdma: bool) -> Iterator[Finding]:
    """Check the links that a sharded model's traffic takes; for models that are not sharded there is nothing to check.

    Args:
        job: The job.
        num_parameters: Elements of the model.
        links: Number of pairs of this node's GPUs by how they are connected (see `gpus.links_in`).
        has_rdma: Whether this node has a network card for RDMA.
    """
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
