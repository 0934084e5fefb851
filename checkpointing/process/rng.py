"""The states of one rank's random number generators, in the form that the Hugging Face Trainer saves and reads."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from types import NoneType
from typing import Any

import numpy as np
import torch

from checkpointing.process import device

_PLAIN_TYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


class _WordType:
    """Stands for `numpy.dtype` while a file is read.

    The real class trusts what a file says about objects and offsets: arrays of a forged one read memory outside their
    own.
    """

    def __init__(self, name: str, align: bool = False, copy: bool = True) -> None:
        if name not in _PLAIN_TYPES:
            raise ValueError(f"arrays of {name!r} are not read, only of plain numbers")
        self.dtype = np.dtype(f"<{name}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = "<" if self.dtype.itemsize > 1 else "|"
        if state != (3, order, None, None, None, -1, -1, 0):
            raise ValueError("not a type of plain numbers")


class Words:
    """Stands for a numpy array of plain numbers while a file is read; `array` is the real one."""

    array: np.ndarray[Any, Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        if not isinstance(dtype, _WordType) or not isinstance(data, bytes):
            raise ValueError("not an array of plain numbers")
        self.array = np.frombuffer(bytearray(data), dtype.dtype).reshape(shape, order="F" if by_columns else "C")


def _reconstruct(kind: object, shape: object, typecode: object) -> Words:
    return Words()


def _number(kind: object, data: object) -> Any:
    if not isinstance(kind, _WordType) or not isinstance(data, bytes) or len(data) != kind.dtype.itemsize:
        raise ValueError("not a plain number")
    return np.frombuffer(data, kind.dtype)[0]


# The classes that numpy arrays, and so the state of numpy's generator, numbers of numpy, deques and defaultdicts are
# made of. With `weights_only`, reading them builds nothing else.
SAFE_GLOBALS: list[Any] = [
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (Words, "numpy.ndarray"),
    (_WordType, "numpy.dtype"),
    (_number, "numpy._core.multiarray.scalar"),
    (deque, "collections.deque"),
    (defaultdict, "collections.defaultdict"),
    *((kind, f"builtins.{kind.__name__}") for kind in (int, float, bool, list, dict, set)),
]


def file_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file, which is Hugging Face's."""
    return f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"


# In checkpoints of several ranks, and of one.
FIRST_RANKS_FILES = (file_name(0, 2), file_name(0, 1))


def host_state() -> dict[str, Any]:
    """Return the generator states of Python, numpy and torch on the CPU."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def state(world_size: int) -> dict[str, Any]:
    """Return the generator states of Python, numpy, torch and, where there is one, the accelerator."""
    return {**host_state(), **device.generator_states(world_size)}


def set_state(states: dict[str, Any]) -> None:
    """Put every generator where `state` found it; raises as `set_host_state`."""
    set_host_state(states)
    device.set_generator_states(states)


def set_host_state(states: dict[str, Any]) -> None:
    """Put the CPU's generators where `host_state` found them.

    Raises:
        Exception: Of any kind, where these are not valid states; the CPU's generators are then unchanged.
    """
    python, words, cpu = states["python"], states["numpy"], states["cpu"]
    if not isinstance(words[1], np.ndarray) or words[1].dtype != np.dtype("<u4"):
        raise ValueError("numpy's state is not an array of 32-bit words")
    # Try the states on generators that are thrown away.
    random.Random().setstate(python)
    torch.Generator().set_state(cpu)
    np.random.RandomState().set_state(words)
    # These do not check everything: numpy draws from wherever the position points to, and the rest fails at the first
    # draw.
    _, key, position, has_gauss, gauss = words
    if type(position) is not int or not 0 <= position <= 624 or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError(f"numpy's state has position {position!r}, second normal {has_gauss!r}, {gauss!r}")
    # One bit of the first word counts. Only zeros follow from a state of zeros: the loop that draws pairs until one is
    # inside a circle would never end.
    if not (key[1:].any() or key[0] >> 31):
        raise ValueError("numpy's state is all zeros")
    if not isinstance(python[2], (float, NoneType)):
        raise ValueError(f"Python's state has second normal {python[2]!r}")
    random.setstate(python)
    np.random.set_state(words)
    torch.random.set_rng_state(cpu)
