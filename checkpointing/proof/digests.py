"""Digests of what a step computes with and from: its batch, the generators, and the parameters after it."""

from __future__ import annotations

import ctypes
import functools
import operator
import random
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from checkpointing.files import sharding
from checkpointing.format.step_record import float_bits
from checkpointing.process import device
from checkpointing.process.device import LateTensor
from checkpointing.state.samples import spread_words

# Numbers of a tensor of a batch that count: all of a row of tokens, one in many of an image.
_NUMBERS = 4096
# Words of a parameter.
_WORDS = 4
_MOST_TEXT = 4096
_PLAIN = (str, bytes, int, float, bool)
# Of a Mersenne twister's 624 words the last ones count: all are replaced at once, and each draw moves the position.
_TWISTER_BYTES = 64
# `mt19937_state` of numpy/random/src/mt19937/mt19937.h: 624 words and the position.
_NUMPY_BYTES = 625 * 4
_PYTHON_STATE = "<625I"
# Of all digests at hand it reads the least memory besides the data: a training step leaves no table in a cache.
_digest: Callable[..., int] = xxhash.xxh3_64_intdigest


class Digest:
    """A checksum of bytes, some of which a device may yet have to compute.

    Attributes:
        count: Number of pieces.
    """

    def __init__(self) -> None:
        self._checksum, self._late = 0, list[LateTensor]()
        self.count = 0

    def add(self, data: Any) -> None:
        """Add bytes, or an array without gaps."""
        self.count += 1
        self._checksum = _digest(data, self._checksum)

    def add_late(self, tensor: torch.Tensor) -> None:
        """Add a tensor on a device, as it is now."""
        self.count += 1
        self._late.append(LateTensor(tensor))

    @property
    def has_arrived(self) -> bool:
        """Whether `value` does not wait for a device."""
        return not self._late or all(late.has_arrived for late in self._late)

    def value(self) -> int:
        """Return the checksum; waits for the device."""
        found = self._checksum
        for late in self._late:
            found = _digest(late.on_host().contiguous().reshape(-1).view(torch.uint8).numpy(), found)
        return found


class BatchDigest(Digest):
    """The digest of a step's batch: shapes, types, and numbers at equal distances of all its tensors.

    Attributes:
        tokens: Numbers in the first tensor of each micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self._has_counted = False

    def add_batch(self, batch: object) -> None:
        """Add a micro-batch.

        Args:
            batch: Tensors, numbers and text, in nested dicts, lists, tuples and named tuples; others do not count.
        """
        self._has_counted = False
        self._add(batch)

    def _add(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                self.add(str(key).encode())
                self._add(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                self._add(one)
        elif isinstance(value, _PLAIN):
            self.add(repr(value)[:_MOST_TEXT].encode())
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            self._add_tensor(torch.from_numpy(np.ascontiguousarray(value)))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if sharding.is_dtensor(tensor):
            tensor = tensor._local_tensor  # type: ignore[attr-defined]
        numbers = tensor.numel()
        if not self._has_counted:
            self._has_counted, self.tokens = True, self.tokens + numbers
        self.add(_described(tensor.dtype, tensor.shape))
        if not numbers or tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        if numbers > _NUMBERS or not tensor.is_contiguous():
            # Odd, so that it is no multiple of a row's length.
            tensor = tensor.reshape(-1)[:: (numbers // _NUMBERS) | 1].contiguous()
        if tensor.device.type == "cpu":
            # At once: a loop may reuse the memory of its batches.
            self.add(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        else:
            self.add_late(tensor.detach())


@functools.lru_cache(256)
def _described(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def generator_digests() -> dict[str, int]:
    """Return digests of the process's default generators, by name in a step record."""
    found = {
        "torch": _digest(torch.default_generator.get_state().numpy()),
        "numpy": _numpy(),
        "python": _python(),
    }
    if device.kind() is not None:
        digest = Digest()
        for words in device.generator_words():
            digest.add(words)
        found["device"] = digest.value()
    return found


def _python() -> int:
    if _is_laid_out():
        words = ctypes.string_at(id(random._inst) + object.__basicsize__, _TWISTER_BYTES)
    else:
        *state, position = random.getstate()[1]
        words = struct.pack(_PYTHON_STATE, position, *state)[:_TWISTER_BYTES]
    return _digest(words, float_bits(random._inst.gauss_next or 0.0))  # type: ignore[attr-defined]


@functools.cache
def _is_laid_out() -> bool:
    """Return whether Python's generator is in memory as CPython has it.

    `getstate` makes a number of each word, and takes longer than all the rest. In CPython, a `RandomObject` has the
    position and then the words behind its head (Modules/_randommodule.c).
    """
    generator, nbytes = random.Random(1), struct.calcsize(_PYTHON_STATE)
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < object.__basicsize__ + nbytes:
        return False
    for _ in range(3):
        generator.random()
        *state, position = generator.getstate()[1]
        found = ctypes.string_at(id(generator) + object.__basicsize__, nbytes)
        if found != struct.pack(_PYTHON_STATE, position, *state):
            return False
    return True


def _numpy() -> int:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return _digest(repr(generator.state).encode())
    return _digest(ctypes.string_at(_numpy_words(generator), _TWISTER_BYTES))


@functools.lru_cache(1)
def _numpy_words(generator: np.random.MT19937) -> int:
    """Return the address of the last words of a generator; its `state` is made of copies, which take longer."""
    return int(generator.ctypes.state_address) + _NUMPY_BYTES - _TWISTER_BYTES


class ParameterSamples:
    """Reads some words of every parameter that an optimizer holds."""

    def __init__(self) -> None:
        # Whether none of them is sharded, or has no memory yet: then they need not be asked again.
        self._is_plain = False
        self._places: list[int] = []
        self._groups: list[_HostWords | _DeviceWords] = []

    def read(self, parameters: Iterable[Any]) -> Digest:
        """Return the digest of the words as they are now."""
        tensors = list(parameters)
        if not self._is_plain or len(tensors) != len(self._places) or any(map(sharding.is_dtensor, tensors[:1])):
            # Sharded ones may be given other memory; one that has no shape yet has none.
            ready = [one for one in tensors if not torch.nn.parameter.is_lazy(one)]
            own = [one._local_tensor if sharding.is_dtensor(one) else one for one in ready]
            self._is_plain = len(own) == len(tensors) and all(map(operator.is_, own, tensors))
            tensors = own
        places = list(map(torch.Tensor.data_ptr, tensors))
        if places != self._places:
            self._places, self._groups = places, _grouped(tensors)
        digest = Digest()
        for group in self._groups:
            group.read(digest)
        return digest


class _HostWords:
    """Words on the host, read from where they are in one call; one of torch for each takes twenty times as long.

    Args:
        views: One-dimensional, of one type; they keep the memory alive.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        size = views[0].element_size()
        addresses = np.concatenate(
            [view.data_ptr() + size * view.stride(0) * np.arange(len(view), dtype=np.int64) for view in views]
        )
        # From the first to the last address of the process that is read; nothing between them is touched.
        first, nbytes = int(addresses.min()), int(addresses.max() - addresses.min()) + size
        memory: Any = (ctypes.c_char * nbytes).from_address(first)
        self._memory = np.frombuffer(memory, np.int64 if size == 8 else np.uint8)
        self._offsets = (addresses - first) // size

    def read(self, digest: Digest) -> None:
        digest.add(self._memory.take(self._offsets))


class _DeviceWords:
    """Words on a device.

    Args:
        views: One-dimensional, of one type.
    """

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._views = views

    def read(self, digest: Digest) -> None:
        digest.add_late(torch.cat(self._views))


def _grouped(tensors: Sequence[torch.Tensor]) -> list[_HostWords | _DeviceWords]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        words = spread_words(tensor.detach(), _WORDS)
        if words is not None:
            groups.setdefault((words.device, words.dtype), []).append(words)
    return [(_HostWords if key[0].type == "cpu" else _DeviceWords)(views) for key, views in groups.items()]


def learning_rate_bits(groups: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the bits of an optimizer's learning rates; None where one is on a device, or is not a number."""
    rates = [group.get("lr") for group in groups]
    if not rates or not all(isinstance(rate, (int, float)) for rate in rates):
        return None
    if len(set(rates)) == 1:
        return float_bits(float(rates[0] or 0.0))
    return _digest(struct.pack(f"<{len(rates)}d", *map(float, rates)))  # type: ignore[arg-type]
