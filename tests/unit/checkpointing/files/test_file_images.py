"""Images of files: their place in an arena, and which rank copies what."""

from __future__ import annotations

import pytest
import torch

from checkpointing.files.file_images import (
    Extent,
    FileImage,
    blob_image,
    bytes_of,
    copy_tensors,
    layout_digest,
    pieces,
    place,
    shares,
)
from checkpointing.host.shared_memory import PAGE_BYTES
from checkpointing.process.device import HostDevice


def tensor_image(name: str, sizes: list[int]) -> FileImage:
    """A file of nothing but tensors, of these sizes in bytes."""
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    tensors = [(offset, torch.zeros(size, dtype=torch.uint8)) for offset, size in zip(offsets, sizes, strict=True)]
    return FileImage(name, sum(sizes), tensors=tensors)


def test_every_file_begins_on_a_page() -> None:
    placed, nbytes = place([blob_image("a", b"x"), blob_image("empty", b""), blob_image("b", bytes(PAGE_BYTES + 1))])
    assert [file.offset for file in placed] == [0, PAGE_BYTES, 2 * PAGE_BYTES]
    assert nbytes == 4 * PAGE_BYTES
    assert place([]) == ([], PAGE_BYTES)


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_shares_are_about_equal_and_cover_every_byte_once(num_shares: int) -> None:
    placed, _ = place([tensor_image("a", [10, 0, 300]), tensor_image("b", [91])])
    covered: list[int] = []
    for share in range(num_shares):
        own = shares(placed, share, num_shares)
        nbytes = sum(extent.source.numel() for extent in own)
        assert abs(nbytes - 401 / num_shares) <= 16
        covered += [position for extent in own for position in range(extent.offset, extent.end)]
    assert sorted(covered) == [*range(310), *range(PAGE_BYTES, PAGE_BYTES + 91)]


def test_what_only_one_rank_holds_is_copied_by_it_whole() -> None:
    image = FileImage("a", 8)
    image.own.append(Extent(0, torch.ones(4, dtype=torch.uint8)))
    image.alone.append((4, torch.ones(4, dtype=torch.uint8)))
    placed, _ = place([image])
    assert [[extent.offset for extent in shares(placed, share, 2)] for share in range(2)] == [[0, 4], [0]]


def test_runs_are_copied_to_equal_distances() -> None:
    """A box of two by two runs of three bytes, in a file that begins on the second page."""
    source = torch.arange(12, dtype=torch.uint8).view(2, 2, 3)
    image = FileImage("a", 64)
    image.own.append(Extent(1, source, (30, 10)))
    placed, nbytes = place([blob_image("first", b"x"), image])
    (extent,) = shares(placed, 1, 2)
    assert (extent.offset, extent.end) == (PAGE_BYTES + 1, PAGE_BYTES + 1 + 30 + 10 + 3)
    buffer = bytearray(b"." * nbytes)
    copy_tensors([extent], memoryview(buffer), HostDevice())
    found = {place: bytes(buffer[PAGE_BYTES + place : PAGE_BYTES + place + 3]) for place in (1, 11, 31, 41)}
    assert found == {1: bytes([0, 1, 2]), 11: bytes([3, 4, 5]), 31: bytes([6, 7, 8]), 41: bytes([9, 10, 11])}
    assert buffer.count(b".") == nbytes - 12


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_file_is_read_through_a_small_window(window: int) -> None:
    image = FileImage("a", 10, literals=[(0, b"head"), (8, b"!?")])
    image.tensors.append((4, bytes_of(torch.tensor([1, 2], dtype=torch.uint8))))
    image.alone.append((6, bytes_of(torch.tensor([3, 4], dtype=torch.uint8))))
    memory = memoryview(bytearray(window))
    assert b"".join(bytes(piece) for piece in pieces(image, memory, HostDevice())) == b"head\x01\x02\x03\x04!?"


def test_the_layouts_digest_depends_on_places_and_not_on_contents() -> None:
    one, other = tensor_image("a", [4, 4]), tensor_image("a", [4, 4])
    other.tensors[0][1].fill_(7)
    assert layout_digest([one]) == layout_digest([other])
    assert layout_digest([one]) != layout_digest([tensor_image("a", [5, 3])])
