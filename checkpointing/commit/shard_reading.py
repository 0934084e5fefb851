"""Reads the shards of a checkpoint from where they are: each part is verified when it is read."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from checkpointing.commit.reading import read_private, read_shared, reading_at
from checkpointing.format.digest import PART_BYTES, num_parts, part_digests
from checkpointing.format.manifest import Manifest
from checkpointing.format.shard_index import (
    Piece,
    ShardIndex,
    ShardParts,
    SpreadFile,
    parts_name,
    shard_name,
    shard_rank,
)
from checkpointing.host.memory import available_bytes
from checkpointing.storage import Storage
from checkpointing.storage.base import RemoteFile

# Of the parts that were read: 256 MB, and one of each shard, if that is no more than a share of the available memory.
_KEPT_PARTS, _MEMORY_SHARE = 8, 1 / 32
ALTERED = "was altered: its digest is not the one that was recorded"


def altered(name: str, digest: str) -> str:
    """Return what is said of a file that was read with other bytes: with their digest, by which two reads compare."""
    return f"{name} {ALTERED} ({digest} was read)"


# Where the bytes of a file are; and with the digest that its manifest has for it.
Source = Path | RemoteFile | memoryview
Recorded = tuple[Source, str]


def recorded_files(storage: Storage, manifest: Manifest) -> dict[str, Recorded]:
    """Return a checkpoint's files, by name."""
    return {file.name: (storage.file(manifest, file.name), file.digest) for file in manifest.files}


class ShardReader(Protocol):
    """Reads bytes of one shard, and verifies every part that it reads."""

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of the shard, in order; each view lasts until the next.

        Raises:
            OSError: It cannot be read.
            ValueError: It was altered, or has no such bytes.
        """


class PartReader:
    """Reads a shard part by part into memory; see `ShardReader`.

    Args:
        parts: The recorded digests.
        read_into: Fills memory with the shard's bytes from a place on; may raise OSError.
        cache: Keeps the parts that were read last; several readers may share it.
        name: Names the shard in errors.
    """

    def __init__(
        self,
        parts: ShardParts,
        read_into: Callable[[int, memoryview], None],
        cache: PartCache,
        name: str,
    ) -> None:
        self._parts, self._read_into, self._cache, self._name = parts, read_into, cache, name

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield what is in one part at a time."""
        if start + nbytes > self._parts.nbytes:
            raise ValueError(f"{self._name} has {self._parts.nbytes} bytes, not {start + nbytes}")
        end = start + nbytes
        while start < end:
            number, skipped = divmod(start, PART_BYTES)
            part = self._cache.get((self._name, number), lambda number=number: self._part(number))  # type: ignore[misc]
            taken = part[skipped : skipped + end - start]
            yield taken
            start += len(taken)

    def _part(self, number: int) -> memoryview:
        memory = memoryview(bytearray(min(PART_BYTES, self._parts.nbytes - number * PART_BYTES)))
        self._read_into(number * PART_BYTES, memory)
        _check_part(self._name, part_digests(memory, [0])[0], self._parts.digests[number])
        return memory


def _check_part(name: str, digest: bytes, recorded: bytes) -> None:
    if digest != recorded:
        raise ValueError(f"{name} was altered: a part of it has another digest")


class PartCache:
    """The parts of shards that were read last: what one reader needs of a part, the next often needs, too.

    Of each shard the last one is kept longest: every shard has its bytes in the order of the files, so a reader of a
    file goes through all shards side by side.

    Args:
        capacity: Number of parts.
        most: The same where there is one of each shard; None for what memory allows.
    """

    def __init__(self, capacity: int = _KEPT_PARTS, most: int | None = None) -> None:
        self._capacity = capacity
        if most is None:
            most = int(available_bytes() * _MEMORY_SHARE) // PART_BYTES
        self._most = max(most, capacity)
        self._parts: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._last: dict[str, int] = {}

    def get(self, key: tuple[str, int], make: Callable[[], memoryview]) -> memoryview:
        """Return a part, read now if it is not kept."""
        name, number = key
        self._last[name] = number
        if key not in self._parts:
            while len(self._parts) >= self._capacity and (left := self._dispensable()) is not None:
                del self._parts[left]
            self._parts[key] = make()
        self._parts.move_to_end(key)
        return self._parts[key]

    def _dispensable(self) -> tuple[str, int] | None:
        """Return the part to drop first; None where there is one of each shard, and there are not too many."""
        left = next((key for key in self._parts if self._last[key[0]] != key[1]), None)
        if left is None and len(self._parts) >= self._most:
            # Not the oldest, which is wanted again before all others.
            return next(reversed(self._parts))
        return left


def read_piece(reader: ShardReader, piece: Piece, span: tuple[int, int], target: memoryview, base: int = 0) -> None:
    """Read some bytes of a piece, and put them where they belong.

    Args:
        reader: Of its shard.
        piece: The piece.
        span: First and last (exclusive) of its bytes, counted from its first.
        target: The file, or a part of it.
        base: Place in the file of the first byte of `target`.

    Raises:
        OSError: The shard cannot be read.
        ValueError: It was altered.
    """
    start, end = span
    for data in reader.read(piece.at + start, end - start):
        piece.put(start, data, target, base)
        start += len(data)


def read_range(file: SpreadFile, readers: Callable[[int], ShardReader], first: int, target: memoryview) -> None:
    """Fill memory with consecutive bytes of a file.

    Args:
        file: The file.
        readers: Return the reader of a rank's shard.
        first: Place of the first byte in the file.
        target: The memory.

    Raises:
        OSError: A shard cannot be read.
        ValueError: One was altered.
    """
    last = first + len(target)
    for piece in file.overlapping(first, last):
        read_piece(readers(piece.shard), piece, piece.within(first, last), target, first)


def index_of(data: bytes | memoryview, files: Mapping[str, Recorded]) -> ShardIndex:
    """Parse the index of a checkpoint, and check that the shards hold what it names.

    Args:
        data: The index, verified.
        files: The checkpoint's files, by name.

    Raises:
        ValueError: It is none, or names bytes that are in no shard.
        OSError: A shard cannot be found.
    """
    index = ShardIndex.from_json(data)
    ranks = {name: rank for name in files if (rank := shard_rank(name)) is not None}
    index.check_places({rank: _size_of(files[name][0]) for name, rank in ranks.items()})
    return index


def _size_of(source: Source) -> int:
    return source.stat().st_size if isinstance(source, Path) else source.nbytes


def parts_of(name: str, files: Mapping[str, Recorded]) -> ShardParts:
    """Return the digests of a shard's parts, verified by the digest that the manifest has for the shard.

    Raises:
        ValueError: The shard or they are not among the files, or were altered.
        OSError: They cannot be read.
    """
    digests = parts_name(name)
    lacking = next((file for file in (name, digests) if file not in files), None)
    if lacking is not None:
        raise ValueError(f"{lacking} is not among its files")
    (_, recorded), (note, _) = files[name], files[digests]
    data = note if isinstance(note, memoryview) else read_private(note, algorithm=None)[0]
    try:
        parts = ShardParts.from_json(data)
    except ValueError as error:
        raise ValueError(f"{digests}: {error}") from None
    if parts.digest != recorded:
        raise ValueError(f"{digests} {ALTERED}")
    return parts


class ShardReaders:
    """The shards of a checkpoint, by rank.

    Args:
        files: The checkpoint's files, by name; none where all shards are read by readers that `supply` is given.
        held: Shards that are in memory, and verified, by rank.
        mapped: Map files, so that what is copied from there is not copied twice; otherwise a few parts at a time are in
            memory, whatever is read.
    """

    def __init__(
        self, files: Mapping[str, Recorded], held: Mapping[int, memoryview] | None = None, *, mapped: bool = True
    ) -> None:
        self._files, self._held, self._mapped = files, dict(held or {}), mapped
        self._cache = PartCache(most=None if mapped else _KEPT_PARTS)
        self._readers: dict[int, ShardReader] = {}

    def __call__(self, rank: int) -> ShardReader:
        """Return the reader of a shard.

        Raises:
            OSError: It cannot be read.
            ValueError: The digests of its parts were altered, or it is not among the files.
        """
        if rank not in self._readers:
            self._readers[rank] = self._open(shard_name(rank), self._held.get(rank))
        return self._readers[rank]

    def supply(self, rank: int, reader: ShardReader) -> None:
        """Read a shard by this reader from now on."""
        self._readers[rank] = reader

    def _open(self, name: str, held: memoryview | None) -> ShardReader:
        if held is not None:
            return _Mapped(name, held, None)
        parts = parts_of(name, self._files)
        source, _ = self._files[name]
        if isinstance(source, Path) and self._mapped:
            source, _ = read_shared(source, None)
        if isinstance(source, memoryview):
            return _Mapped(name, source, parts)
        return PartReader(parts, reading_at(source), self._cache, name)


def in_memory(name: str, data: memoryview, parts: ShardParts) -> ShardReader:
    """Return the reader of a shard in memory, with the recorded digests of its parts."""
    return _Mapped(name, data, parts)


class _Mapped:
    """A shard in memory, or a file that is mapped there; see `ShardReader`.

    Args:
        name: Names the shard in errors.
        data: Its bytes.
        parts: The recorded digests; None where all of it has been verified.
    """

    def __init__(self, name: str, data: memoryview, parts: ShardParts | None) -> None:
        self._name, self._data, self._recorded = name, data, parts
        self._verified: set[int] = set()

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes in one view."""
        expected = self._recorded.nbytes if self._recorded is not None else len(self._data)
        if start + nbytes > len(self._data) or expected != len(self._data):
            raise ValueError(f"{self._name} has {len(self._data)} bytes, not {max(start + nbytes, expected)}")
        if self._recorded is not None:
            numbers = set(range(start // PART_BYTES, num_parts(start + nbytes))) - self._verified
            for number, digest in part_digests(self._data, sorted(numbers)).items():
                _check_part(self._name, digest, self._recorded.digests[number])
            self._verified |= numbers
        yield self._data[start : start + nbytes]


class CommonPieces:
    """What every reader needs of the first rank's shard; reads like a shard, see `ShardReader`.

    Args:
        pieces: Bytes by their place in the shard.
        shard: Reads everything else.
    """

    def __init__(self, pieces: Mapping[int, bytes], shard: ShardReader) -> None:
        self._pieces, self._places, self._shard = pieces, sorted(pieces), shard

    @classmethod
    def read_from(cls, reader: ShardReader, index: ShardIndex) -> dict[int, bytes]:
        """Return what there is to pass on.

        Args:
            reader: Of the first rank's shard.
            index: Which bytes are in which shard.

        Raises:
            OSError: The shard cannot be read.
            ValueError: It was altered.
        """
        pieces = (piece for file in index.files.values() for piece in file.common)
        return {piece.at: b"".join(reader.read(piece.at, piece.nbytes)) for piece in pieces}

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes."""
        number = bisect.bisect_right(self._places, start) - 1
        place = self._places[number] if number >= 0 else 0
        data = memoryview(self._pieces.get(place, b""))[start - place : start - place + nbytes]
        if len(data) == nbytes:
            yield data
        else:
            yield from self._shard.read(start, nbytes)
