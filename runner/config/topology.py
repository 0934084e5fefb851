"""The number of nodes, and of ranks on this one."""

from __future__ import annotations

from runner.config.schema import Config
from runner.errors import UsageError


def shape_of(config: Config, accelerators: int) -> tuple[int, int]:
    """Machines, and ranks on this one, by options, variables and GPUs.

    Raises:
        UsageError: they do not fit together.
    """
    launch = config.launch
    nproc = (accelerators or 2) if launch.nproc_per_node == "auto" else launch.nproc_per_node
    nnodes = launch.nnodes
    if launch.world_size is not None and nnodes == 1:
        if launch.world_size % nproc:
            raise UsageError(
                f"WORLD_SIZE={launch.world_size} is not a multiple of the {nproc} ranks on this machine; set "
                "--nproc-per-node, or unset WORLD_SIZE"
            )
        nnodes = launch.world_size // nproc
    if launch.node_rank >= nnodes:
        raise UsageError(
            f"node rank {launch.node_rank} (--node-rank or RANK) needs more than {nnodes} machine(s) of {nproc} "
            "ranks; check --nnodes, WORLD_SIZE and --nproc-per-node"
        )
    return nnodes, nproc
