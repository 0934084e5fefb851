"""Fingerprints of tensors: by them ranks find out that their replicas differ, and the agent that a copy does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from checkpointing.rank.file_images import Extent
from checkpointing.word_sum import WORD_BYTES, added, word_sum


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

    What is on an accelerator is summed there, behind what is enqueued on this thread's current streams.
    """

    def __init__(self) -> None:
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
        if extent.strides:
            # Each run begins on another place of a word: what has arrived is taken.
            self._rest += _runs(extent)
            return
        if source.device.type == "cpu":
            data: Any = source.numpy()
            self._sums.append(word_sum(memoryview(data), offset))
            return
        head = min(-offset % WORD_BYTES, len(source))
        whole = (len(source) - head) // WORD_BYTES * WORD_BYTES
        body = source[head : head + whole]
        if not whole or body.storage_offset() % WORD_BYTES:
            self._rest.append((offset, offset + len(source)))
            return
        self._later.append(body.view(torch.int64).sum())
        self._rest += [(offset, offset + head), (offset + head + whole, offset + len(source))]

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


def _runs(extent: Extent) -> list[tuple[int, int]]:
    """Return the places of the runs of an extent."""
    *counts, length = extent.source.shape
    places = [extent.offset]
    for count, stride in zip(counts, extent.strides, strict=True):
        places = [place + number * stride for place in places for number in range(count)]
    return [(place, place + length) for place in places]
