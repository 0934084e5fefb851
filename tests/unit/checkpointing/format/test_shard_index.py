"""Files that are spread over shards: read by ranges, whatever way they were cut in, and every part verified."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from checkpointing.commit.shard_reading import PartCache, PartReader, read_range
from checkpointing.format import shard_index as shards
from checkpointing.format.digest import digest_buffer
from checkpointing.format.shard_index import (
    Piece,
    ShardIndex,
    ShardParts,
    SpreadFile,
    parts_name,
    shard_name,
    shard_rank,
)


@dataclass
class Spread:
    """A file of random bytes, and the shards that it is spread over."""

    data: bytes
    file: SpreadFile
    shards: dict[int, bytearray]

    def reader(self, rank: int) -> PartReader:
        data = memoryview(self.shards[rank])

        def read_into(start: int, target: memoryview) -> None:
            target[:] = data[start : start + len(target)]

        return PartReader(ShardParts.of(data), read_into, PartCache(2), shard_name(rank))

    def read(self, first: int, last: int) -> bytes:
        target = bytearray(last - first)
        read_range(self.file, self.reader, first, memoryview(target))
        return bytes(target)


def spread(places: list[tuple[Piece, int]], data: bytes) -> Spread:
    """Pack the bytes of pieces, each into the shard of a rank."""
    holdings = [
        ShardIndex({"file": SpreadFile(len(data), (), tuple(piece for piece, holder in places if holder == rank))})
        for rank in range(3)
    ]
    index, sizes = ShardIndex.laid_out(holdings)
    bins = {rank: bytearray(nbytes) for rank, nbytes in enumerate(sizes)}
    for piece in index.files["file"].pieces:
        runs = [piece.run_offset(number) for number in range(piece.num_runs)]
        own = b"".join(data[offset : offset + piece.length] for offset in runs)
        bins[piece.shard][piece.at : piece.at + piece.nbytes] = own
    return Spread(data, index.files["file"], bins)


@st.composite
def spreads(draw: st.DrawFn) -> Spread:
    """A header, then matrices that are cut by rows, by columns, or both."""
    header = draw(st.integers(0, 9))
    places, offset = ([(Piece(0, header), 0)] if header else []), header
    for _ in range(draw(st.integers(1, 3))):
        rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=2))})
        column_cuts = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=2))})
        for top, bottom in itertools.pairwise(row_cuts):
            for left, right in itertools.pairwise(column_cuts):
                first, whole = offset + top * columns + left, right - left == columns
                length = (bottom - top) * columns if whole else right - left
                levels = () if whole or bottom - top == 1 else ((bottom - top, columns),)
                places.append((Piece(first, length, levels), draw(st.integers(0, 2))))
        offset += rows * columns
    return spread(places, os.urandom(offset))


@given(spreads(), st.data())
def test_any_range_is_read_back(case: Spread, data: st.DataObject) -> None:
    case.file.check()
    first = data.draw(st.integers(0, len(case.data)))
    last = data.draw(st.integers(first, len(case.data)))
    assert case.read(first, last) == case.data[first:last]


@given(spreads())
def test_an_index_survives_the_way_through_a_file(case: Spread) -> None:
    index = ShardIndex({"model.safetensors": case.file})
    assert ShardIndex.from_json(index.to_json()) == index


def test_what_several_ranks_hold_is_in_the_shard_of_the_lowest() -> None:
    halves = [ShardIndex({"a": SpreadFile(200, (), (Piece(100 * n, 100),))}) for n in (1, 0, 1)]
    index, sizes = ShardIndex.laid_out(halves)
    assert index.files["a"].pieces == (Piece(100, 100, (), 0, 0), Piece(0, 100, (), 1, 0)) and sizes == [128, 128, 0]
    with pytest.raises(ValueError, match="100 bytes"):
        ShardIndex.laid_out(halves[:1])


def test_what_is_wanted_as_it_was_written_is_one_piece() -> None:
    piece = Piece(3, 2, ((4, 5),), 1, 64)
    file = SpreadFile(20, (), (piece,))
    assert file.exactly(Piece(3, 2, ((4, 5),))) is piece and file.exactly(Piece(3, 2, ((3, 5),))) is None


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{}",
        b'{"files": {"a": {"nbytes": 4, "common": [], "pieces": []}}}',
        b'{"files": {"a": {"nbytes": 4, "common": [], "pieces": [[0, 4, [], 0]]}}}',
        b'{"files": {"a": {"nbytes": 4, "common": [], "pieces": [[0, -4, [[-1, 0]], 0, 0]]}}}',
        b'{"files": {"a": {"nbytes": 4, "common": [], "pieces": [[1, 4, [], 0, 0]]}}}',
        b'{"files": {"a": {"nbytes": 4, "common": [], "pieces": [[0, 4, [], 0, 0.5]]}}}',
    ],
)
def test_another_index_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"field|piece|bytes|unpack|Expecting"):
        ShardIndex.from_json(text)


def test_the_digest_of_the_parts_is_that_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(1000)
    parts = ShardParts.of(memoryview(data))
    assert parts.digest == digest_buffer(data)
    assert ShardParts.from_json(parts.to_json()) == parts
    for text in (b"{}", b"[]", b'{"nbytes": 1000, "parts": ""}', b'{"nbytes": true, "parts": ""}', b"x"):
        with pytest.raises(ValueError, match=r"field|digests|Expecting"):
            ShardParts.from_json(text)


def test_a_part_that_was_altered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = spread([(Piece(0, 1000), 0)], os.urandom(1000))
    reader = case.reader(0)
    case.shards[0][500] ^= 1
    with pytest.raises(ValueError, match=r"shards/0\.bin was altered"):
        list(reader.read(10, 20))
    with pytest.raises(ValueError, match="has 1024 bytes"):
        list(case.reader(0).read(1000, 100))


def test_parts_are_read_once_while_they_are_kept() -> None:
    cache, made = PartCache(2), []

    def make(number: int) -> memoryview:
        made.append(number)
        return memoryview(bytes([number]))

    for number in (0, 1, 0, 2, 0, 1):
        assert bytes(cache.get(("a", number), lambda number=number: make(number))) == bytes([number])  # type: ignore[misc]
    assert made == [0, 1, 2, 1]


def test_names() -> None:
    assert shard_name(12) == "shards/12.bin" and parts_name("shards/12.bin") == "shards/12.parts.json"
    assert shard_rank("shards/12.bin") == 12
    assert shard_rank("shards/12.parts.json") is None and shard_rank(shards.INDEX_NAME) is None
