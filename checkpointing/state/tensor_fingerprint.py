"""Fingerprints of tensors: by them ranks find out that their replicas differ, and the agent that a copy does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from checkpointing.files.file_images import Extent
from checkpointing.format.digest import WORD_BYTES, added, word_sum

K = TypeVar("K")
# Bytes that are summed and looked at while they are in the cache.
_BLOCK_BYTES = 1 << 19
# Numbers that are added in one go: few enough that no library uses several threads.
_ROW = 4096
_ONES: dict[Any, np.ndarray] = {kind: np.ones(_ROW, kind) for kind in (np.float32, np.float64)}
FINITE_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def fingerprint(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum each tensor's bytes as 64-bit words, with wrap-around.

    This runs at memory speed, on the device that holds the tensor. Changing any one value changes the sum.

    Args:
        tensors: Contiguous uint8 tensors with one dimension.

    Returns:
        An int64 tensor on the CPU with one sum per tensor.
    """
    sums = []
    for flat in tensors:
        words = flat.numel() // 8
        aligned = flat.data_ptr() % 8 == 0
        total = flat[: words * 8].view(torch.int64).sum() if aligned else flat[: words * 8].sum(dtype=torch.int64)
        sums.append(total + flat[words * 8 :].sum(dtype=torch.int64))
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    # Part of an optimizer's state may be on the host. Waiting once per device is enough.
    found = torch.empty(len(sums), dtype=torch.int64)
    for device in {total.device for total in sums}:
        numbers = [number for number, total in enumerate(sums) if total.device == device]
        found[numbers] = torch.stack([sums[number] for number in numbers]).cpu()
    return found


class SourceSum:
    """The sum of the words that extents bring into an arena, of their sources.

    What is on an accelerator is summed there, behind what is enqueued on this thread's current streams. Numbers that
    are not finite are found on the way, while their bytes are in the processor's cache.

    Args:
        kinds: Type of what is to be finite, by the address of its storage.
    """

    def __init__(self, kinds: Mapping[int, torch.dtype] | None = None) -> None:
        self._kinds = kinds or {}
        # Addresses of storages, and of those on a device what says so later.
        self._not_finite: list[int] = []
        self._norms: list[tuple[int, torch.Tensor]] = []
        self._sums: list[int] = []
        self._nbytes = 0
        self._later: list[torch.Tensor] = []
        # Places in the arena of bytes that are not whole words of their source.
        self._rest: list[tuple[int, int]] = []

    def add(self, extents: Iterable[Extent]) -> None:
        """Add sources, while they are what is copied."""
        for extent in extents:
            self._nbytes += extent.source.numel()
            self._add(extent)

    def _add(self, extent: Extent) -> None:
        source, offset = extent.source, extent.offset
        address = (source if extent.of is None else extent.of).untyped_storage().data_ptr()
        kind = self._kinds.get(address)
        if extent.strides:
            # Each run begins on another place of a word: what has arrived is taken.
            self._rest += _runs(extent)
            if kind is not None and source.device.type != "cpu":
                self._norms.append((address, _norm(source.reshape(-1).view(kind))))
            elif kind is not None and not _is_finite(source, kind):
                self._not_finite.append(address)
            return
        if source.device.type == "cpu":
            data: Any = source.numpy()
            with np.errstate(all="ignore"):
                finite = _Finite(data, kind)
                for begin in range(0, len(data), _BLOCK_BYTES):
                    end = min(begin + _BLOCK_BYTES, len(data))
                    self._sums.append(word_sum(memoryview(data[begin:end]), offset + begin))
                    finite.look(begin, end)
                if not finite.are_all_finite():
                    self._not_finite.append(address)
            return
        if kind is not None and source.storage_offset() % kind.itemsize == 0:
            whole_numbers = len(source) // kind.itemsize * kind.itemsize
            if whole_numbers:
                self._norms.append((address, _norm(source[:whole_numbers].view(kind))))
        head = min(-offset % WORD_BYTES, len(source))
        whole = (len(source) - head) // WORD_BYTES * WORD_BYTES
        body = source[head : head + whole]
        if not whole or body.storage_offset() % WORD_BYTES:
            self._rest.append((offset, offset + len(source)))
            return
        self._later.append(body.view(torch.int64).sum())
        self._rest += [(offset, offset + head), (offset + head + whole, offset + len(source))]

    def not_finite(self) -> list[int]:
        """Return the addresses of storages that hold NaN or infinity; waits for the device."""
        return list(dict.fromkeys([*self._not_finite, *_infinite(self._norms)]))

    def total(self, buffer: memoryview, literals: Sequence[tuple[int, bytes]]) -> tuple[int, int]:
        """Return the sum, and of how many bytes it is, once everything has been copied; waits for the device.

        Args:
            buffer: The arena.
            literals: Bytes that this rank puts there besides, with their places.
        """
        found = list(self._sums)
        for device in {tensor.device for tensor in self._later}:
            found += torch.stack([tensor for tensor in self._later if tensor.device == device]).cpu().tolist()
        found += [word_sum(buffer[begin:end], begin) for begin, end in self._rest if begin < end]
        found += [word_sum(data, offset) for offset, data in literals]
        return added(found), self._nbytes + sum(len(data) for _, data in literals)


class FiniteLook:
    """A look for NaN and infinity in small tensors: at once on the host, enqueued on a device.

    Args:
        tensors: Strided tensors of any type, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._found: list[str] = []
        self._norms: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors.items():
            if tensor.dtype not in FINITE_TYPES or not tensor.numel():
                continue
            if tensor.device.type != "cpu":
                self._norms.append((name, _norm(tensor.detach())))
            # Not torch, whose threads belong to training.
            elif not _is_finite(tensor.detach().contiguous().reshape(-1).view(torch.uint8), tensor.dtype):
                self._found.append(name)

    def names(self) -> list[str]:
        """Return the names of those that hold NaN or infinity; waits for the device."""
        return [*self._found, *_infinite(self._norms)]


def _norm(numbers: torch.Tensor) -> torch.Tensor:
    """Return the greatest magnitude, which is not finite if a number is not; enqueued, in no further memory."""
    kind = torch.float64 if numbers.dtype is torch.float64 else torch.float32
    found: torch.Tensor = torch.linalg.vector_norm(numbers, math.inf, dtype=kind)
    return found


def _infinite(norms: Sequence[tuple[K, torch.Tensor]]) -> list[K]:
    """Return the keys of norms that are not finite; waits once for each device."""
    found = []
    for device in {norm.device for _, norm in norms}:
        mine = [(key, norm) for key, norm in norms if norm.device == device]
        values = torch.stack([norm.double() for _, norm in mine]).cpu().tolist()
        found += [key for (key, _), value in zip(mine, values, strict=True) if not math.isfinite(value)]
    return found


def _is_finite(data: torch.Tensor, kind: torch.dtype) -> bool:
    """Return whether bytes on the host hold finite numbers only."""
    with np.errstate(all="ignore"):
        found = _Finite(data.reshape(-1).numpy(), kind)
        found.look(0, data.numel())
        return found.are_all_finite()


class _Finite:
    """Whether bytes on the host hold finite numbers only; numpy stays in this thread, as torch would not.

    Args:
        data: The bytes.
        kind: Type of the numbers; None where they may be anything.
    """

    def __init__(self, data: np.ndarray, kind: torch.dtype | None) -> None:
        self._are_short_finite = True
        self._width = kind.itemsize if kind is not None else 0
        self._values = self._bits = None
        if kind is None:
            return
        numbers = data[: len(data) // self._width * self._width]
        if numbers.ctypes.data % self._width:
            numbers = numbers.copy()
        if kind in (torch.float32, torch.float64):
            values = self._values = numbers.view(np.float32 if kind is torch.float32 else np.float64)
            self._ones = _ONES[values.dtype.type]
            num_rows = len(values) // _ROW
            self._rows, self._rest = values[: num_rows * _ROW].reshape(-1, _ROW), values[num_rows * _ROW :]
            self._sums = np.zeros(num_rows, values.dtype)
        else:
            # Of shorter types, as integers: an exponent of ones is the greatest, with either sign.
            self._bits = numbers.view(np.int16), numbers.view(np.uint16)
            self._limit = 0x7F80 if kind is torch.bfloat16 else 0x7C00

    def look(self, begin: int, end: int) -> None:
        """Look at the numbers between two places, in bytes, that are between two rows, or at the end.

        Must be called for all bytes, with numpy's warnings switched off.
        """
        if self._values is not None:
            # Sums of rows, quicker than numpy adds: as products with ones.
            rows = slice(begin // self._width // _ROW, end // self._width // _ROW)
            np.vecdot(self._rows[rows], self._ones, out=self._sums[rows])
        elif self._bits is not None and self._are_short_finite:
            signed, unsigned = (bits[begin // self._width : end // self._width] for bits in self._bits)
            self._are_short_finite = bool(
                np.maximum.reduce(signed, initial=0) < self._limit
                and np.maximum.reduce(unsigned, initial=0) < self._limit + 0x8000
            )

    def are_all_finite(self) -> bool:
        """Return whether all numbers are finite, once they were looked at."""
        if self._values is None:
            return self._are_short_finite
        # A sum is not finite if a number is not; one that overflows is looked at closely.
        total = float(np.add.reduce(self._sums)) + float(np.vecdot(self._rest, self._ones[: len(self._rest)]))
        if math.isfinite(total):
            return True
        blocks = range(0, len(self._values), _BLOCK_BYTES)
        return all(np.isfinite(self._values[begin : begin + _BLOCK_BYTES]).all() for begin in blocks)


def _runs(extent: Extent) -> list[tuple[int, int]]:
    """Return the places of the runs of an extent."""
    *counts, length = extent.source.shape
    places = [extent.offset]
    for count, stride in zip(counts, extent.strides, strict=True):
        places = [place + number * stride for place in places for number in range(count)]
    return [(place, place + length) for place in places]
