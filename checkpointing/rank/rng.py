"""Random number generators of one rank, in the form that the Hugging Face Trainer saves and reads."""

from __future__ import annotations

import random
from types import NoneType
from typing import Any

import numpy as np
import torch

from checkpointing.rank import device

_PLAIN_TYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


class _WordType:
    """Stands for `numpy.dtype` while a file is read. The real one believes what a file says about objects and offsets:
    arrays of a forged one read memory that is not theirs.
    """

    def __init__(self, name: str, align: bool = False, copy: bool = True) -> None:
        if name not in _PLAIN_TYPES:
            raise ValueError(f"arrays of {name!r} are not read, only of plain numbers")
        self.dtype = np.dtype(f"<{name}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = "<" if self.dtype.itemsize > 1 else "|"
        if state != (3, order, None, None, None, -1, -1, 0):
            raise ValueError("it is no type of plain numbers")


class Words:
    """Stands for a numpy array of plain numbers while a file is read; `array` is the real one."""

    array: np.ndarray[Any, Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        if not isinstance(dtype, _WordType) or not isinstance(data, bytes):
            raise ValueError("it is no array of plain numbers")
        self.array = np.frombuffer(bytearray(data), dtype.dtype).reshape(shape, order="F" if by_columns else "C")


def _reconstruct(kind: object, shape: object, typecode: object) -> Words:
    return Words()


# What numpy arrays, and so the state of numpy's generator, are made of; nothing else may be built while reading them
# (`weights_only`).
SAFE_GLOBALS: list[Any] = [
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (Words, "numpy.ndarray"),
    (_WordType, "numpy.dtype"),
]


def file_name(rank: int, world_size: int) -> str:
    """Hugging Face's name of a rank's file."""
    return f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"


def host_state() -> dict[str, Any]:
    """Python's, numpy's and torch's CPU generator states."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def state(world_size: int) -> dict[str, Any]:
    """Python's, numpy's, torch's and, where there is one, the GPUs' generator states."""
    return {**host_state(), **device.generator_states(world_size)}


def set_state(states: dict[str, Any]) -> None:
    """Put every generator where `state` found it.

    Raises:
        Exception: of any kind, where these are no states; then none of the CPU's has been touched.
    """
    set_host_state(states)
    device.set_generator_states(states)


def set_host_state(states: dict[str, Any]) -> None:
    """Put the CPU's generators where `host_state` found them.

    Raises:
        Exception: of any kind, where these are no states; then none of the CPU's has been touched.
    """
    python, words, cpu = states["python"], states["numpy"], states["cpu"]
    if not isinstance(words[1], np.ndarray) or words[1].dtype != np.dtype("<u4"):
        raise ValueError("numpy's state is no array of 32-bit words")
    # Tried out on generators that nobody uses.
    random.Random().setstate(python)
    torch.Generator().set_state(cpu)
    np.random.RandomState().set_state(words)
    # What those do not look at: numpy draws from wherever the position points to, and the rest fails at the first draw.
    _, key, position, has_gauss, gauss = words
    if type(position) is not int or not 0 <= position <= 624 or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError(f"numpy's state has position {position!r}, second normal {has_gauss!r}, {gauss!r}")
    # Of the first word one bit counts. Nothing but zeros ever follows from zeros, and the second normal is drawn until
    # two numbers lie in a circle: never.
    if not (key[1:].any() or key[0] >> 31):
        raise ValueError("numpy's state is all zeros")
    if not isinstance(python[2], (float, NoneType)):
        raise ValueError(f"Python's state has second normal {python[2]!r}")
    random.setstate(python)
    np.random.set_state(words)
    torch.random.set_rng_state(cpu)
