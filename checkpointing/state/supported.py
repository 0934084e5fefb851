"""Refuses what cannot be saved when it is given, by its name, not at the first save hundreds of steps later."""

from __future__ import annotations

from typing import Any

import torch

from checkpointing.errors import CheckpointError

# torchao quantizes the state of parameters with at least this many elements and a multiple of its block size.
_TORCHAO_MIN_NUMEL = 4096


def check_model(model: object) -> None:
    """Check that a model can be saved; None is allowed.

    Raises:
        CheckpointError: It is not one module that each rank holds whole or as FSDP2 has sharded it.
    """
    if model is None:
        return
    if type(model).__module__.startswith("torch.distributed.pipelining"):
        raise CheckpointError(
            f"{type(model).__name__} is not a model: give the module of this rank's stage, and pipeline=True"
        )
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(
            f"model is a {type(model).__name__}, not a torch.nn.Module; join several models in a torch.nn.ModuleList "
            "or ModuleDict, or give all but one in `states`"
        )
    # By name: importing FSDP takes half a second.
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise CheckpointError("FSDP1 (FullyShardedDataParallel) is not supported; use FSDP2: fully_shard(model)")


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer can be saved; None is allowed.

    Raises:
        CheckpointError: It is not one optimizer whose state is equal on all ranks, or sharded as FSDP2 does it.
    """
    if isinstance(optimizer, (list, tuple, dict)):
        raise CheckpointError(
            f"optimizer is a {type(optimizer).__name__}; give one, and the others in `states`, for example "
            "states={'discriminator_optimizer': ...}"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise CheckpointError(
            "ZeroRedundancyOptimizer is not supported: each rank holds another part of its state. Use FSDP2, or the "
            "optimizer itself under DDP"
        )
    if type(optimizer).__module__.startswith("torchao."):
        block = getattr(optimizer, "block_size", None) or 1
        sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
        if any(size >= _TORCHAO_MIN_NUMEL and size % block == 0 for size in sizes):
            raise CheckpointError(
                f"torchao's {type(optimizer).__name__} is not supported: its quantized state cannot be read without "
                "running code from the checkpoint. Use bitsandbytes' 8-bit optimizers (optim='adamw_bnb_8bit')"
            )
