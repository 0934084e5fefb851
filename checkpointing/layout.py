"""Names of the files in a checkpoint."""

from __future__ import annotations

MODEL_NAME = "model.safetensors"
# In its place where only a part of the model is trained; PEFT's name.
ADAPTER_NAME = "adapter_model.safetensors"
WEIGHTS_NAMES = (MODEL_NAME, ADAPTER_NAME)
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
# What modules give as `get_extra_state`, where that is no tensor.
EXTRA_STATE_NAME = "extra_state.pt"
# Every rank's share of the loop's state that Hugging Face does not save.
LOOP_STATE_PREFIX = "loop_state_"


def loop_state_name(rank: int) -> str:
    """The file of a rank's share."""
    return f"{LOOP_STATE_PREFIX}{rank}.json"


def rank_state_name(rank: int) -> str:
    """The file of what differs between ranks: objects in `states`, and buffers of the model."""
    return f"rank_state_{rank}.pt"


PER_RANK_PREFIXES = ("rng_state", "data_state", "rank_state", LOOP_STATE_PREFIX)
