"""Images of checkpoint files: where their bytes come from, their place in an arena, and the copy there.

A snapshot is not serialised. Shapes do not change during a run, so every tensor has a fixed place in its file, and the
arena holds the files' images themselves. Only headers, and state too small to matter, are written each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from checkpointing.host.shared_memory import PAGE_BYTES, place_on_pages
from checkpointing.process.device import Device

# No element is larger.
_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Extent:
    """Bytes of the live state, and where they belong: one run of bytes, or several at equal distances.

    Attributes:
        offset: Place of the first byte.
        source: uint8 tensor: its last dimension is a run, the others count the runs, by level.
        strides: Distance in bytes between the begins of two runs, by level; empty for one run.
        of: The live tensor that `source` is a copy of; None where it is a view.
    """

    offset: int
    source: torch.Tensor
    strides: tuple[int, ...] = ()
    of: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """Place behind the last byte."""
        *counts, length = self.source.shape
        return self.offset + sum((n - 1) * step for n, step in zip(counts, self.strides, strict=True)) + length

    def shifted(self, distance: int) -> Extent:
        """Return the same bytes at a place that many bytes later."""
        return replace(self, offset=self.offset + distance)


@dataclass(frozen=True)
class FileImage:
    """The contents of a checkpoint file.

    Attributes:
        name: File name inside the checkpoint.
        nbytes: Size of the file.
        literals: Bytes, each with its offset.
        tensors: Flat uint8 views of the live state, each with its offset; equal on all ranks. The copy reads them.
        own: What only this rank holds.
        alone: The same, for what differs between ranks and is taken from the node's local rank 0.
    """

    name: str
    nbytes: int
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    tensors: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    own: list[Extent] = field(default_factory=list)
    alone: list[tuple[int, torch.Tensor]] = field(default_factory=list)


def blob_image(name: str, data: bytes) -> FileImage:
    """Return the image of a file whose bytes are at hand."""
    return FileImage(name, len(data), literals=[(0, data)])


def bytes_of(flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one dimension as uint8, sharing its memory."""
    return flat.view(torch.uint8)


def tensor_over(buffer: memoryview, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over part of a file, with a storage of its own; a copy where the offset is not aligned."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(buffer[offset : offset + nbytes]), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, offset=offset, count=nbytes // dtype.itemsize)


@dataclass(frozen=True)
class PlacedFile:
    """A file image and its offset in the arena, in bytes; page-aligned, so that it can be written with O_DIRECT."""

    image: FileImage
    offset: int


def place(images: Sequence[FileImage]) -> tuple[list[PlacedFile], int]:
    """Lay images out one after the other, each on a page; return them and the bytes needed."""
    offsets, end = place_on_pages(image.nbytes for image in images)
    return list(map(PlacedFile, images, offsets)), max(end, PAGE_BYTES)


def layout_digest(images: Sequence[FileImage]) -> dict[str, str]:
    """Return, by file, a digest of the tensors' offsets; equal on ranks that write parts of the same file."""
    return {
        image.name: hashlib.blake2b(
            repr((image.nbytes, [(offset, tensor.numel()) for offset, tensor in image.tensors])).encode(),
            digest_size=16,
        ).hexdigest()
        for image in images
    }


def shares(placed: Sequence[PlacedFile], share: int, num_shares: int) -> list[Extent]:
    """Return what one of `num_shares` ranks copies, with its places in the arena.

    State that DDP replicates is equal on all ranks, so N ranks copy 1/N each, by bytes, between elements. What only one
    rank holds, it copies whole.
    """
    extents = [(file.offset + offset, tensor) for file in placed for offset, tensor in file.image.tensors]
    total = sum(tensor.numel() for _, tensor in extents)
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    found = []
    position = 0
    for offset, tensor in extents:
        first, last = (_between_elements(bound - position, tensor.numel()) for bound in (begin, end))
        if first < last:
            found.append(Extent(offset + first, tensor[first:last]))
        position += tensor.numel()
    for file in placed:
        alone = (Extent(offset, tensor) for offset, tensor in (file.image.alone if share == 0 else ()))
        found += [extent.shifted(file.offset) for extent in (*file.image.own, *alone) if extent.source.numel()]
    return found


def _between_elements(place: int, nbytes: int) -> int:
    """Return a place in a tensor of so many bytes, or at one of its ends, that is between two elements."""
    return nbytes if place >= nbytes else max(place, 0) // _ALIGNED_BYTES * _ALIGNED_BYTES


def copy_tensors(extents: Sequence[Extent], buffer: memoryview, device: Device) -> None:
    """Copy `shares` into the arena; from an accelerator, the copies are enqueued on its current stream."""
    for extent in extents:
        if extent.strides:
            device.copy_runs(buffer, extent.offset, extent.source, extent.strides)
        else:
            device.copy(buffer, extent.offset, extent.source)


def placed_literals(placed: Sequence[PlacedFile]) -> list[tuple[int, bytes]]:
    """Return everything but the tensors, with its places in the arena."""
    return [(file.offset + offset, data) for file in placed for offset, data in file.image.literals]


def copy_literals(literals: Sequence[tuple[int, bytes]], buffer: memoryview) -> None:
    """Copy them into the arena."""
    for offset, data in literals:
        buffer[offset : offset + len(data)] = data


def pieces(image: FileImage, window: memoryview, device: Device) -> Iterator[memoryview]:
    """Yield the file's bytes in order, through a small window of memory that every piece uses again."""
    position = 0
    while position < image.nbytes:
        nbytes = min(len(window), image.nbytes - position)
        part = FileImage(image.name, nbytes)
        for offset, data in image.literals:
            first, last = max(position - offset, 0), min(position + nbytes - offset, len(data))
            if first < last:
                part.literals.append((offset + first - position, data[first:last]))
        for offset, tensor in [*image.tensors, *image.alone]:
            first, last = max(position - offset, 0), min(position + nbytes - offset, tensor.numel())
            if first < last:
                part.tensors.append((offset + first - position, tensor[first:last]))
        placed = [PlacedFile(part, 0)]
        copy_tensors(shares(placed, 0, 1), window, device)
        copy_literals(placed_literals(placed), window)
        device.mark().wait()
        yield window[:nbytes]
        position += nbytes
