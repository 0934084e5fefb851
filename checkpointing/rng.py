"""Random number generators of one rank, in the form that the Hugging Face Trainer saves and reads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# What a numpy generator state is made of; nothing else may be built while reading it (`weights_only`).
SAFE_GLOBALS: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]


def file_name(rank: int, world_size: int) -> str:
    """Hugging Face's name of a rank's file."""
    return f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"


def state(world_size: int) -> dict[str, Any]:
    """Python's, numpy's, torch's and, where there is one, the GPUs' generator states."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all() if world_size > 1 else torch.cuda.get_rng_state()
    return states


def set_state(states: dict[str, Any]) -> None:
    """Put every generator where `state` found it."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        cuda = states["cuda"]
        if isinstance(cuda, torch.Tensor):
            torch.cuda.set_rng_state(cuda)
        else:
            # Each rank uses one device; a state of more or fewer devices is of another machine.
            for device, device_state in enumerate(cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(device_state, device)
