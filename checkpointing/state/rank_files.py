"""What is saved of each rank where the ranks differ: objects of which there is otherwise one file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from checkpointing.format.layout import EXTRA_STATE_NAME, OPTIONS_NAME, SCALER_NAME, SCHEDULER_NAME, rank_object_name
from checkpointing.process.ranks import Ranks
from checkpointing.state.tensor_fingerprint import fingerprint

# Each rank of a pipeline has its own; others may, by the script's choice.
OBJECTS = (SCHEDULER_NAME, SCALER_NAME, EXTRA_STATE_NAME, OPTIONS_NAME)


def numbers_of(small: Mapping[str, bytes]) -> list[int]:
    """Return one number for each of `OBJECTS`, by which ranks compare them; 0 for what there is not."""
    return [number_of(small[name]) if name in small else 0 for name in OBJECTS]


def number_of(data: bytes) -> int:
    """Return a number that is equal for equal bytes, and whose negative fits into 64 bits, too."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), signed=True) >> 1


def own_objects(small: Mapping[str, bytes], differing: frozenset[str], rank: int) -> dict[str, bytes]:
    """Return this rank's files of those objects that differ.

    Args:
        small: All its small files, by name.
        differing: Names of files that are not equal on all ranks.
        rank: Number of this rank.
    """
    return {rank_object_name(name, rank): small[name] for name in OBJECTS if name in differing and name in small}


def differing_buffers(buffers: Mapping[str, torch.Tensor], ranks: Ranks) -> set[str]:
    """Return the names of buffers that are not equal on all ranks that have them; called by all ranks.

    Args:
        buffers: This rank's, by name.
        ranks: This rank among all.
    """
    numbers = fingerprint(value.contiguous().reshape(-1).view(torch.uint8) for value in buffers.values()).tolist()
    found: dict[str, set[int]] = {}
    for theirs in ranks.gather(dict(zip(buffers, numbers, strict=True))):
        for name, number in theirs.items():
            found.setdefault(name, set()).add(number)
    return {name for name, different in found.items() if len(different) > 1}
