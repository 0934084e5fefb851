"""The number of nodes, and of ranks on this one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.config.schema import Config
from runner.errors import GpuMissing, UsageError


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


def check_promised_gpu(config: Config, environment: Mapping[str, str], devices: Path) -> None:
    """Refuse to train on the CPU of a node that should have GPUs, where torch finds none.

    Raises:
        GpuMissing: There should be GPUs, and the user has not asked for the CPU.
    """
    promised = promised_gpu(environment, devices) if config.trainer.get("use_cpu") is not True else None
    if promised:
        raise GpuMissing(
            f"{promised}, but torch finds no GPU: the driver is missing, too old for this torch, or has lost "
            "them (nvidia-smi). To train on the CPU: --set trainer.use_cpu=true, or CUDA_VISIBLE_DEVICES=-1"
        )


def promised_gpu(environment: Mapping[str, str], devices: Path) -> str | None:
    """What says that this machine or container has NVIDIA GPUs to use; None where nothing does.

    Args:
        devices: The folder of device files, `/dev`.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    nodes = sorted(path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if nodes:
        return f"there is {nodes[0]}"
    # Set by who starts the container, for the runtime that makes the devices.
    wanted = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return f"NVIDIA_VISIBLE_DEVICES={wanted}" if wanted not in ("", "none", "void") else None
