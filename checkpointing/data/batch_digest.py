"""A digest of a batch's contents: what tells samples from each other, where there is no sampler whose indices would.

Whole numbers and texts (labels, tokens, names) count. Other numbers count only where there is nothing else: they are
what augmentation changes, while the samples are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

# Values of a tensor that are read, spread evenly over it.
_NUM_VALUES = 4096


def batch_digest(batch: Any) -> str:
    """Return the digest; equal for equal batches, in whatever memory they are."""
    exact, other = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    num_exact = sum(_add(leaf, exact, other) for leaf in _leaves(batch))
    return (exact if num_exact else other).hexdigest()


def _add(leaf: Any, exact: Any, other: Any) -> bool:
    """Add a value to the digest that it belongs to; return whether that is the exact one."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().reshape(-1)
        few = flat[:: max(1, flat.numel() // _NUM_VALUES)].cpu().contiguous()
        is_exact = not (few.is_floating_point() or few.is_complex())
        digest = exact if is_exact else other
        digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(few.view(torch.uint8).numpy().tobytes() if few.numel() else b"")
        return is_exact
    if isinstance(leaf, (np.ndarray, np.generic)):
        is_exact = leaf.dtype.kind not in "fc"
        flat_array = np.asarray(leaf).reshape(-1)
        few_values = flat_array[:: max(1, flat_array.size // _NUM_VALUES)]
        (exact if is_exact else other).update(f"{leaf.dtype}{leaf.shape}{few_values.tolist()}".encode())
        return is_exact
    is_exact = isinstance(leaf, (bool, int, str, bytes))
    if is_exact or isinstance(leaf, (float, complex)):
        (exact if is_exact else other).update(repr(leaf).encode())
    return is_exact


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
