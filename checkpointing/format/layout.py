"""Names of the files in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

MODEL_NAME = "model.safetensors"
# As Hugging Face; larger ones are divided, and have an index.
MOST_MODEL_BYTES = 5 * 10**9
MODEL_INDEX_NAME = f"{MODEL_NAME}.index.json"
# Instead, where only a part of the model is trained; PEFT's name.
ADAPTER_NAME = "adapter_model.safetensors"
WEIGHTS_NAMES = (MODEL_NAME, ADAPTER_NAME)
# What else may hold a model or an adapter, in the order in which Hugging Face's libraries choose; an index names the
# files of a model that is in parts.
ANY_MODEL_NAMES = (MODEL_NAME, MODEL_INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
ANY_ADAPTER_NAMES = (ADAPTER_NAME, "adapter_model.bin")
# Parameters in full precision, by the model's names, where the optimizer has these and the model a shorter type.
MASTER_NAME = "master_weights.safetensors"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
# What a Hugging Face trainer keeps besides.
TRAINER_STATE_NAME = "trainer_state.json"
# What modules return from `get_extra_state`, where that is not a tensor.
EXTRA_STATE_NAME = "extra_state.pt"
# The options of an optimizer's groups, where each stage of a pipeline has its own.
OPTIONS_NAME = "optimizer_options.pt"
# Names of buffers that training has made, or has given another shape or type.
BUFFERS_NAME = "changed_buffers.json"
# In which order an optimizer has its parameters, where its state dict has a layout of its own.
ORDER_NAME = "optimizer_order.json"
# In which order DistributedDataParallel sums gradients.
BUCKETS_NAME = "ddp_buckets.json"
# Next to the checkpoints: a state with NaN or infinity, for a post-mortem.
NOT_FINITE_FOLDER = "not-finite"
# Every rank's share of the loop's state that Hugging Face does not save.
LOOP_STATE_PREFIX = "loop_state_"
# Every rank's record of its last steps.
STEP_RECORD_PREFIX = "step_record_"


def divided(sizes: Mapping[str, int], most_bytes: int = MOST_MODEL_BYTES) -> dict[str, list[str]]:
    """Return the names of the tensors in each of a model's files, in order, given their sizes in bytes.

    Only a file of a single tensor has more than `most_bytes`.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if groups[-1] and filled + nbytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return {MODEL_NAME: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def loop_state_name(rank: int) -> str:
    """Return the name of a rank's share."""
    return f"{LOOP_STATE_PREFIX}{rank}.json"


def rank_state_name(rank: int) -> str:
    """Return the name of the file that differs between ranks: objects in `states`, and buffers of the model."""
    return f"rank_state_{rank}.pt"


def rank_object_name(name: str, rank: int) -> str:
    """Return the name of a rank's own file of an object of which there is otherwise one file."""
    return f"rank_state_{rank}_{name}"


def step_record_name(rank: int) -> str:
    """Return the name of a rank's step record in a checkpoint, and next to them."""
    return f"{STEP_RECORD_PREFIX}{rank}.bin"


# Every rank's generators that its script holds.
SCRIPT_STATE_PREFIX = "script_state_"


def script_state_name(rank: int) -> str:
    """Return the name of the file of a rank's generators that its script holds."""
    return f"{SCRIPT_STATE_PREFIX}{rank}.pt"


PER_RANK_PREFIXES = (
    *("rng_state", "data_state", "rank_state"),
    *(LOOP_STATE_PREFIX, STEP_RECORD_PREFIX, SCRIPT_STATE_PREFIX),
)


# What only training reads; besides, all that Python has pickled.
_TRAINING_NAMES = (MASTER_NAME, TRAINER_STATE_NAME, BUFFERS_NAME, ORDER_NAME, BUCKETS_NAME)
_PICKLED = (".pt", ".pth", ".bin")


def is_of_training(name: str) -> bool:
    """Return whether a file of a checkpoint is read by training only, not by who loads the model."""
    return name in _TRAINING_NAMES or name.endswith(_PICKLED) or name.startswith(PER_RANK_PREFIXES)
