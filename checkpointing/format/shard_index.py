"""Files that no node holds whole: their bytes are in shards, one per rank, and an index says where.

    shards/index.json        which bytes of which file are where in which shard
    shards/<rank>.bin        what one rank held, packed
    shards/<rank>.parts.json size, digest and the digests of the parts of that shard; written when the shard is durable
    shards/begun.json        written before all of these, by the node that commits

A file that is spread over shards is the same, byte for byte, as one that is written whole: any number of ranks can read
it, each only the bytes that it needs. A part that is read is verified by its own digest; the digest of all parts is the
one that the manifest has for the shard.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from checkpointing.format.digest import PART_BYTES, digest_of_parts, num_parts, part_digests

FOLDER = "shards/"
INDEX_NAME = f"{FOLDER}index.json"
# Written first: a save that several nodes write has begun, and was not given up.
BEGUN_NAME = f"{FOLDER}begun.json"
# Nothing read from an index may point outside the checkpoint's own folder.
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z")
_SHARD = re.compile(rf"{FOLDER}(\d+)\.bin\Z")
# Of the pieces in a shard, in bytes: every element is aligned, whatever its type.
ALIGNMENT = 64
_TOO_LARGE = 2**63


def shard_name(rank: int) -> str:
    """Return the name of a rank's shard."""
    return f"{FOLDER}{rank}.bin"


def parts_name(shard: str) -> str:
    """Return the name of the file with the digests of a shard's parts."""
    return f"{shard.removesuffix('.bin')}.parts.json"


def state_name(shard: str) -> str:
    """Return the name of the note that says how far a node is with its shards, of which this is the first."""
    return f"{shard.removesuffix('.bin')}.state.json"


def shard_rank(name: str) -> int | None:
    """Return the rank whose shard a file is; None for any other file."""
    match = _SHARD.match(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True, order=True)
class Piece:
    """Some runs of bytes of a file, at equal distances, which follow each other in a shard.

    Attributes:
        offset: Place of the first byte in the file.
        length: Bytes of each run.
        levels: Number of runs, and the distance in bytes between the begins of two, the outermost level first; empty
            for a single run.
        shard: The rank in whose shard they are.
        at: Their place in the shard.
    """

    offset: int
    length: int
    levels: tuple[tuple[int, int], ...] = ()
    shard: int = 0
    at: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of runs, by level."""
        return tuple(count for count, _ in self.levels)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between the begins of two runs, by level."""
        return tuple(stride for _, stride in self.levels)

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return math.prod(self.counts)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.length * self.num_runs

    @property
    def end(self) -> int:
        """Place in the file behind the last byte."""
        return self.run_offset(self.num_runs - 1) + self.length

    def run_offset(self, number: int) -> int:
        """Return the place of a run in the file."""
        offset = self.offset
        for count, stride in reversed(self.levels):
            number, index = divmod(number, count)
            offset += index * stride
        return offset

    def within(self, first: int, last: int) -> tuple[int, int]:
        """Return which of its bytes, counted from its first, can be in a range of the file: whole runs, if several."""
        if not self.levels:
            begin, end = max(first - self.offset, 0), min(last - self.offset, self.length)
            return begin, max(end, begin)
        numbers = range(self.num_runs)
        begin = bisect.bisect_left(numbers, first + 1, key=lambda number: self.run_offset(number) + self.length)
        end = bisect.bisect_left(numbers, last, key=self.run_offset)
        return begin * self.length, max(end, begin) * self.length

    def put(self, start: int, data: memoryview, target: memoryview, base: int = 0) -> None:
        """Put some of its bytes where they belong.

        Args:
            start: Number of the first of them, counted from the piece's first byte.
            data: The bytes.
            target: The file, or a part of it; what is outside is left out.
            base: Place in the file of the first byte of `target`.
        """
        for begin, position, nbytes in self.places(start, len(data)):
            place = begin - base
            first, last = max(-place, 0), min(nbytes, len(target) - place)
            if first < last:
                target[place + first : place + last] = data[position + first : position + last]

    def places(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield where `nbytes` of its bytes from number `start` on belong.

        Yields:
            For each run: its place in the file, that among these bytes, and its size in bytes.
        """
        position = 0
        while position < nbytes:
            number, skipped = divmod(start + position, self.length)
            count = min(self.length - skipped, nbytes - position)
            yield self.run_offset(number) + skipped, position, count
            position += count

    def to_list(self) -> list[Any]:
        """Return what `from_list` reads."""
        return [self.offset, self.length, [list(level) for level in self.levels], self.shard, self.at]

    @classmethod
    def from_list(cls, value: Any) -> Piece:
        """Parse a piece; raises ValueError or TypeError where it is none."""
        offset, length, levels, shard, at = value
        piece = cls(offset, length, tuple((count, stride) for count, stride in levels), shard, at)
        numbers = [offset, length, shard, at, *itertools.chain.from_iterable(piece.levels)]
        if not all(type(number) is int and 0 <= number < _TOO_LARGE for number in numbers) or not piece.nbytes:
            raise ValueError(f"{reprlib.repr(value)!a} is not a piece of a file")
        return piece


@dataclass(frozen=True)
class SpreadFile:
    """A file whose bytes are in shards."""

    nbytes: int
    common: tuple[Piece, ...]  # what every reader needs: headers, and what is not sharded
    pieces: tuple[Piece, ...]  # all else
    _sorted: list[Piece] = field(init=False, repr=False, compare=False)
    # For each piece in this order, the largest end up to it: what begins later may end earlier.
    _ends: list[int] = field(init=False, repr=False, compare=False)
    _by_place: dict[tuple[int, int, tuple[tuple[int, int], ...]], Piece] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        everything = sorted([*self.common, *self.pieces])
        object.__setattr__(self, "_sorted", everything)
        object.__setattr__(self, "_ends", list(itertools.accumulate((piece.end for piece in everything), max)))
        places = {(piece.offset, piece.length, piece.levels): piece for piece in everything}
        object.__setattr__(self, "_by_place", places)

    def check(self) -> None:
        """Check that the pieces can be all of the file; raises ValueError where they cannot."""
        total = sum(piece.nbytes for piece in self._sorted)
        if total != self.nbytes or (self._ends and self._ends[-1] > self.nbytes):
            raise ValueError(f"its pieces have {total} bytes, or reach behind its end at {self.nbytes}")

    def exactly(self, wanted: Piece) -> Piece | None:
        """Return the piece of just these bytes; None where they are cut in another way."""
        return self._by_place.get((wanted.offset, wanted.length, wanted.levels))

    def overlapping(self, first: int, last: int) -> Iterator[Piece]:
        """Yield all pieces that may have bytes in a range of the file."""
        for number in range(bisect.bisect_right(self._ends, first), len(self._sorted)):
            piece = self._sorted[number]
            if piece.offset >= last:
                return
            if piece.end > first:
                yield piece


@dataclass(frozen=True)
class ShardIndex:
    """Which files are spread over shards, by name, and how."""

    files: Mapping[str, SpreadFile]

    def to_json(self) -> bytes:
        """Return the index as JSON."""
        files = {
            name: {
                "nbytes": file.nbytes,
                "common": [piece.to_list() for piece in file.common],
                "pieces": [piece.to_list() for piece in file.pieces],
            }
            for name, file in self.files.items()
        }
        return json.dumps({"files": files}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> ShardIndex:
        """Parse an index; raises ValueError where it is none, or the pieces of a file are not all of it."""
        try:
            files = {}
            for name, entry in json.loads(bytes(data))["files"].items():
                common, pieces = (tuple(map(Piece.from_list, entry[key])) for key in ("common", "pieces"))
                nbytes = entry["nbytes"]
                if type(nbytes) is not int or not 0 <= nbytes < _TOO_LARGE:
                    raise TypeError
                if not _FILE.match(name):
                    raise ValueError(f"the file name {reprlib.repr(name)!a} is not allowed")
                files[name] = SpreadFile(nbytes, common, pieces)
                files[name].check()
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{INDEX_NAME} lacks or mistypes a field ({type(error).__name__})") from None
        return cls(files)

    def check_places(self, sizes: Mapping[int, int]) -> None:
        """Check that every piece is inside its shard, of these sizes by rank; raises ValueError where one is not."""
        for file in self.files.values():
            for piece in (*file.common, *file.pieces):
                if piece.at + piece.nbytes > sizes.get(piece.shard, 0):
                    raise ValueError(f"{INDEX_NAME} names bytes that are not in {shard_name(piece.shard)}")

    def gaps(self, rank: int) -> list[tuple[int, int]]:
        """Return the places in a rank's shard that are behind a piece and before the next; its own layout only."""
        pieces = [piece for file in self.files.values() for piece in (*file.common, *file.pieces)]
        ends = sorted(piece.at + piece.nbytes for piece in pieces if piece.shard == rank)
        return [(end, _aligned(end)) for end in ends if end % ALIGNMENT]

    @classmethod
    def laid_out(cls, holdings: Sequence[ShardIndex]) -> tuple[ShardIndex, list[int]]:
        """Give each piece that ranks hold a place in a shard; what several hold is the lowest rank's.

        Args:
            holdings: What each rank holds, by rank; the pieces have no place yet.

        Returns:
            The index of all, and the size of each rank's shard.

        Raises:
            ValueError: The pieces of a file are not all of it.
        """
        found: dict[str, tuple[int, list[Piece], list[Piece]]] = {}
        seen: set[tuple[str, Piece]] = set()
        sizes = []
        for rank, held in enumerate(holdings):
            end = 0
            for name, file in held.files.items():
                _, *kinds = found.setdefault(name, (file.nbytes, [], []))
                for pieces, placed in zip((file.common, file.pieces), kinds, strict=True):
                    for piece in pieces:
                        if (name, piece) not in seen:
                            seen.add((name, piece))
                            placed.append(replace(piece, shard=rank, at=end))
                            end = _aligned(end + piece.nbytes)
            sizes.append(end)
        index = cls({name: SpreadFile(nbytes, tuple(a), tuple(b)) for name, (nbytes, a, b) in found.items()})
        for file in index.files.values():
            file.check()
        return index, sizes


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class HeldFile:
    """A file of a checkpoint, or a shard, in a node's memory."""

    name: str
    data: memoryview
    parts: Callable[[], ShardParts]  # returns the digests of its parts, once they are known

    def part(self, numbers: range) -> memoryview:
        """Return the bytes of consecutive parts, by number."""
        return self.data[numbers.start * PART_BYTES : numbers.stop * PART_BYTES]


@dataclass(frozen=True)
class ShardParts:
    """What is known of a shard that is durable: its size, and the digests of its parts, in order."""

    nbytes: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, buffer: memoryview) -> ShardParts:
        """Digest a shard in memory."""
        return cls(len(buffer), tuple(part_digests(buffer, range(num_parts(len(buffer)))).values()))

    @property
    def digest(self) -> str:
        """The digest of the whole shard, as a manifest has it."""
        return digest_of_parts(self.digests)

    def to_json(self) -> bytes:
        """Return what `from_json` reads."""
        return json.dumps({"nbytes": self.nbytes, "parts": b"".join(self.digests).hex()}).encode()

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> ShardParts:
        """Parse the digests of a shard; raises ValueError where they are not those of a file of that size."""
        try:
            document = json.loads(bytes(data))
            nbytes, joined = document["nbytes"], bytes.fromhex(document["parts"])
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the digests of a shard lack or mistype a field ({type(error).__name__})") from None
        if type(nbytes) is not int or not 0 <= nbytes < _TOO_LARGE or len(joined) != 16 * num_parts(nbytes):
            raise ValueError(f"{len(joined)} bytes of digests are not those of its parts")
        return cls(nbytes, tuple(joined[start : start + 16] for start in range(0, len(joined), 16)))
