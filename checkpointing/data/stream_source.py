"""Which data sets can be read as seekable streams, and the state that their epochs begin with."""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

from packaging.version import Version
from torch.utils.data import IterableDataset

from checkpointing.errors import CheckpointError


def is_seekable(dataset: Any) -> bool:
    """Return whether a data set has no length and can continue from a saved state."""
    return (
        isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    )


def beginning_of(dataset: Any) -> dict[str, Any]:
    """Return a stream's state before its first sample, even if it has been read from.

    Raises:
        CheckpointError: The stream is divided among the ranks already, or its library does not resume streams
            correctly.
    """
    if type(dataset).__module__.startswith("datasets."):
        version = Version(importlib.metadata.version("datasets"))
        # Tried with 4.7.0, 4.8.0, 4.8.5, 5.0.0, 5.1.0, 5.2.0: those without the fix continued elsewhere in the stream.
        if version < Version("4.8.5") or version.release[:2] == (5, 0):
            raise CheckpointError(
                f"datasets {version} does not resume a stream where it was; install datasets 4.8.5, or 5.1 or newer"
            )
    if getattr(dataset, "_distributed", None) is not None:
        raise CheckpointError(
            "the streamed data set was given through split_dataset_by_node; give it whole: each rank takes its share "
            "of every batch, so that the number of ranks may change"
        )
    if hasattr(dataset, "_prepare_ex_iterable_for_iteration"):
        # A data set of `datasets` has the state of the last sample that was read; a freshly prepared copy does not.
        dataset = copy.copy(dataset)
        dataset._prepare_ex_iterable_for_iteration()
    state: dict[str, Any] = dataset.state_dict()
    return state
