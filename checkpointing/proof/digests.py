"""Digests of what a step computes with and from: its batch, the generators, and the parameters after it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import random
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from checkpointing.files import sharding
from checkpointing.format.step_record import float_bits
from checkpointing.process import device
from checkpointing.process.device import LateTensor
from checkpointing.state.samples import spread_words

# Numbers of a tensor of a batch that count: all of a row of tokens, one in many of an image.
_NUMBERS = 4096
# Words of a parameter.
_WORDS = 8
_MOST_TEXT = 4096
# `mt19937_state` of numpy/random/src/mt19937/mt19937.h: 624 words and the position.
_MT19937_BYTES = 625 * 4
_PYTHON_STATE = "<625I"
_PLAIN = (str, bytes, int, float, bool)


def digest64(parts: Iterable[bytes | memoryview]) -> int:
    """Return a 64-bit digest of bytes."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "little")


class BatchDigest:
    """The digest of a micro-batch: shapes, types, and numbers at equal distances of all its tensors.

    Args:
        batch: Tensors, numbers and text in nested dicts, lists, tuples and named tuples. Other objects do not count.

    Attributes:
        tokens: Numbers in its first tensor.
    """

    def __init__(self, batch: object) -> None:
        self._text, self._late = hashlib.blake2b(digest_size=8), list[LateTensor]()
        self.tokens, self._has_any = 0, False
        for leaf in _leaves(batch):
            self._has_any = True
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.detach())
            else:
                self._text.update(repr(leaf)[:_MOST_TEXT].encode())

    def _add(self, tensor: torch.Tensor) -> None:
        if sharding.is_dtensor(tensor):
            tensor = tensor._local_tensor  # type: ignore[attr-defined]
        self.tokens = self.tokens or tensor.numel()
        self._text.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
            return
        flat = tensor.reshape(-1)
        if len(flat) > _NUMBERS:
            # Odd, so that it is no multiple of a row's length.
            flat = flat[:: (len(flat) // _NUMBERS) | 1]
        if flat.device.type == "cpu":
            # At once: a loop may reuse the memory of its batches.
            self._text.update(_bytes(flat))
        else:
            self._late.append(LateTensor(flat.contiguous()))

    @property
    def is_known(self) -> bool:
        """Whether anything of the batch counts."""
        return self._has_any

    @property
    def has_arrived(self) -> bool:
        """Whether `value` does not wait for a device."""
        return all(late.has_arrived for late in self._late)

    def value(self) -> bytes:
        """Return the digest; waits for the device that holds the batch."""
        found = self._text.copy()
        for late in self._late:
            found.update(_bytes(late.on_host()))
        return found.digest()


def _leaves(batch: object) -> Iterable[Any]:
    if isinstance(batch, (torch.Tensor, *_PLAIN)):
        yield batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield str(key)
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    elif isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        yield torch.from_numpy(np.ascontiguousarray(batch))


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def generator_digests() -> dict[str, int]:
    """Return digests of the process's default generators, by name in a step record."""
    found = {
        "torch": zlib.crc32(bytes(torch.default_generator.get_state().numpy())),
        "numpy": _numpy(),
        "python": _python(),
    }
    if device.kind() is not None:
        found["device"] = digest64(device.generator_words())
    return found


def _python() -> int:
    words = _python_words()
    if words is None:
        words = struct.pack(_PYTHON_STATE, *random.getstate()[1])
    return zlib.crc32(words, hash(random._inst.gauss_next or 0.0) & 0xFFFFFFFF)  # type: ignore[attr-defined]


def _python_words() -> bytes | None:
    """Return 624 words and the position of Python's generator where CPython has them; None elsewhere.

    `getstate` makes a number of each, and takes longer than all the rest. In CPython, a `RandomObject` has the position
    and then the words behind its head (Modules/_randommodule.c); that is verified once.
    """
    if not _is_laid_out():
        return None
    found = ctypes.string_at(id(random._inst) + object.__basicsize__, _MT19937_BYTES)
    return found[4:] + found[:4]


@functools.cache
def _is_laid_out() -> bool:
    generator = random.Random(1)
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    for _ in range(3):
        generator.random()
        found = ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES)
        if found[4:] + found[:4] != struct.pack(_PYTHON_STATE, *generator.getstate()[1]):
            return False
    return True


def _numpy() -> int:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return zlib.crc32(repr(generator.state).encode())
    # Its `state` is made of copies that take longer than all the rest.
    return zlib.crc32(ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES))


class ParameterSamples:
    """Reads some words of every parameter that an optimizer holds."""

    def __init__(self) -> None:
        # Whether none of them is sharded, or has no memory yet: then they need not be asked again.
        self._is_plain = False
        self._places: list[int] = []
        self._groups: list[list[torch.Tensor]] = []

    def read(self, parameters: Iterable[Any]) -> list[LateTensor]:
        """Return the words as they are now, one tensor for each device and size of a word."""
        tensors = list(parameters)
        if not self._is_plain or len(tensors) != len(self._places) or any(map(sharding.is_dtensor, tensors[:1])):
            # Sharded ones may be given other memory; one that has no shape yet has none.
            ready = [one for one in tensors if not torch.nn.parameter.is_lazy(one)]
            own = [one._local_tensor if sharding.is_dtensor(one) else one for one in ready]
            self._is_plain = len(own) == len(tensors) and all(map(operator.is_, own, tensors))
            tensors = own
        places = [one.data_ptr() for one in tensors]
        if places != self._places:
            self._places, self._groups = places, _grouped(tensors)
        return [LateTensor(torch.cat(views)) for views in self._groups]


def _grouped(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        words = spread_words(tensor.detach(), _WORDS)
        if words is not None:
            groups.setdefault((words.device, words.dtype), []).append(words)
    return list(groups.values())


def samples_digest(samples: Iterable[LateTensor]) -> int:
    """Return the digest of words that have arrived."""
    checksum = 0
    for late in samples:
        checksum = zlib.crc32(_bytes(late.on_host()), checksum)
    return checksum


def learning_rate_bits(groups: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the bits of an optimizer's learning rates; None where one is on a device, or is not a number."""
    rates = [group.get("lr") for group in groups]
    if not rates or not all(isinstance(rate, (int, float)) for rate in rates):
        return None
    if len(set(rates)) == 1:
        return float_bits(float(rates[0] or 0.0))
    return digest64([struct.pack(f"<{len(rates)}d", *map(float, rates))])  # type: ignore[arg-type]
