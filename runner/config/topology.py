"""The number of nodes, and the number of ranks on this node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.config.schema import Config
from runner.errors import GpuMissing, UsageError


def shape_of(config: Config, accelerators: int) -> tuple[int, int]:
    """Derive the shape of a run from options, variables and GPUs.

    Args:
        config: The run.
        accelerators: Number of GPUs of this node.

    Returns:
        The number of nodes, and the number of ranks on this node.

    Raises:
        UsageError: The settings contradict each other.
    """
    launch = config.launch
    nproc = (accelerators or 2) if launch.nproc_per_node == "auto" else launch.nproc_per_node
    nnodes = launch.nnodes
    if launch.world_size is not None and nnodes == 1:
        if launch.world_size % nproc:
            raise UsageError(
                f"WORLD_SIZE={launch.world_size} is not a multiple of the {nproc} ranks on this node; set "
                "--nproc-per-node, or unset WORLD_SIZE"
            )
        nnodes = launch.world_size // nproc
    mesh = config.mesh
    if mesh is not None and nnodes * nproc % mesh.ranks:
        raise UsageError(
            f"strategy: {mesh} needs a multiple of {mesh.ranks} ranks, and this run has {nnodes * nproc}: change the "
            "mesh, --nnodes or --nproc-per-node"
        )
    if mesh is not None and nproc % mesh.tp:
        raise UsageError(
            f"strategy: {{tp: {mesh.tp}}} would reach over nodes of {nproc} ranks, whose links are too slow for that: "
            "choose a tp that divides the ranks of a node, and dp_shard for the rest"
        )
    if launch.node_rank >= nnodes and (launch.min_nodes is None or nnodes == 1):
        raise UsageError(
            f"node rank {launch.node_rank} (--node-rank or RANK) needs more than {nnodes} node(s) of {nproc} "
            "ranks; check --nnodes, WORLD_SIZE and --nproc-per-node"
        )
    return nnodes, nproc


def check_same_nnodes(own: int, leaders: int) -> None:
    """Check that this node was started for as many nodes as the leader.

    Raises:
        UsageError: It was not.
    """
    if own != leaders:
        raise UsageError(
            f"this node was started with --nnodes {own}, the leader with --nnodes {leaders}; start all nodes with the "
            "same number"
        )


def check_promised_gpu(config: Config, environment: Mapping[str, str], devices: Path) -> None:
    """Refuse to train on the CPU of a node that should have GPUs. Called if torch finds none.

    Args:
        config: The run.
        environment: Environment variables.
        devices: The folder of device files, `/dev`.

    Raises:
        GpuMissing: There should be GPUs, and the user did not ask for the CPU.
    """
    promised = promised_gpu(environment, devices) if config.trainer.get("use_cpu") is not True else None
    if promised:
        raise GpuMissing(
            f"{promised}, but torch finds no GPU: the driver is missing, too old for this torch, or has lost "
            "them; check nvidia-smi, or train on the CPU with --set trainer.use_cpu=true or CUDA_VISIBLE_DEVICES=-1"
        )


def promised_gpu(environment: Mapping[str, str], devices: Path) -> str | None:
    """Return the evidence that this node or container should have NVIDIA GPUs, or None.

    Args:
        environment: Environment variables.
        devices: The folder of device files, `/dev`.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    nodes = sorted(path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if nodes:
        return f"{nodes[0]} exists"
    # The container runtime creates the devices that this variable requests.
    wanted = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return f"NVIDIA_VISIBLE_DEVICES={wanted}" if wanted not in ("", "none", "void") else None
