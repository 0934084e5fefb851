"""Files of a checkpoint that are spread over shards: each rank reads the bytes that it needs, and no more.

A file is parsed in memory of its whole size, in which only headers and what was asked for have contents: pages that
nobody writes to take no memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpointing.commit.reading import digest_of, fault, private_memory, read_private, read_shared
from checkpointing.commit.shard_reading import (
    CommonPieces,
    Recorded,
    ShardReader,
    ShardReaders,
    altered,
    index_of,
    parts_of,
    read_piece,
    read_range,
)
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files import sharding
from checkpointing.format.boxes import Box, runs
from checkpointing.format.digest import algorithm_of
from checkpointing.format.shard_index import (
    INDEX_NAME,
    Piece,
    ShardIndex,
    ShardParts,
    SpreadFile,
    shard_name,
    shard_rank,
)
from checkpointing.process.trees import tensors_in

# mmap(2): the kernel does not set memory aside for pages that are never written to. In Python's module since 3.13.
_MAP_NORESERVE = 0x4000
_MANY_PAGES_BYTES = 1 << 20


# Takes the reason why a snapshot in memory cannot be used.
OnFault = Callable[[str], None]


@dataclass(frozen=True)
class _Opened:
    """A file in memory, most of which has no contents."""

    buffer: memoryview
    address: int
    file: SpreadFile


class SpreadFiles:
    """The spread files of one checkpoint, as one rank reads them.

    Args:
        label: What the checkpoint is called in messages.
        index: Which bytes are in which shard.
        files: The checkpoint's files, by name.
        held: Shards that are in memory, and verified, by rank.
        served: Digests of the parts of shards that this rank has verified, for ranks that read them from its memory.
        on_fault: Called with the reason where a read fails after all.
    """

    def __init__(
        self,
        label: str,
        index: ShardIndex,
        files: Mapping[str, Recorded],
        held: Mapping[int, memoryview],
        served: Mapping[int, ShardParts] | None = None,
        on_fault: OnFault = lambda reason: None,
    ) -> None:
        self._label, self._index, self._readers = label, index, ShardReaders(files, held)
        self.served = dict(served or {})
        self._release: Callable[[], None] = lambda: None
        self._opened: dict[str, _Opened] = {}
        self._on_fault = on_fault

    def common_pieces(self) -> dict[int, bytes]:
        """Return what every reader needs of the first rank's shard; raises as `open` does."""
        with self._reading():
            return CommonPieces.read_from(self._readers(0), self._index)

    def add_common_pieces(self, pieces: Mapping[int, bytes]) -> None:
        """Take in what the first rank has sent, which need not be read from its shard any more."""
        with self._reading():
            self._readers.supply(0, CommonPieces(pieces, self._readers(0)))

    def read_from(self, readers: Mapping[int, ShardReader], release: Callable[[], None]) -> None:
        """Read the shards by these readers from now on; `end_reading` calls `release`."""
        for rank, reader in readers.items():
            self._readers.supply(rank, reader)
        self._release = release

    def end_reading(self) -> None:
        """Read nothing more, once all ranks have read what they need; called by all together."""
        self._release()
        self._release = lambda: None

    def has(self, name: str) -> bool:
        """Return whether a file is spread over shards."""
        return name in self._index.files

    def verify(self, is_own: Callable[[int], bool], without: Collection[str]) -> None:
        """Read the parts of some ranks' shards that have bytes of any file but `without`; raises as `open` does."""
        pieces = [
            piece
            for name, file in self._index.files.items()
            for piece in (*file.common, *file.pieces)
            if name not in without and is_own(piece.shard)
        ]
        with self._reading():
            for piece in sorted(pieces, key=lambda piece: (piece.shard, piece.at)):
                # Every part is verified when it is read.
                for _ in self._readers(piece.shard).read(piece.at, piece.nbytes):
                    pass

    def open(self, name: str) -> memoryview:
        """Return memory of a file's size, with what every reader needs: headers, and what is not sharded.

        Raises:
            InvalidCheckpoint: A shard is missing, or was altered.
            StorageUnreachable: One cannot be read now.
        """
        file = self._index.files[name]
        memory = mmap.mmap(-1, max(file.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        opened = self._opened[name] = _Opened(memoryview(memory), address, file)
        with self._reading():
            for piece in file.common:
                read_piece(self._readers(piece.shard), piece, (0, piece.nbytes), opened.buffer)
        return opened.buffer[: file.nbytes]

    def cut(self, name: str, whole: torch.Tensor, live: Any, *, in_place: bool = False) -> torch.Tensor:
        """Return this rank's part of a tensor of a file, which was parsed without contents; see `sharding.cut_like`.

        Raises:
            InvalidCheckpoint: A shard is missing, or was altered.
            StorageUnreachable: One cannot be read now.
        """
        fits = sharding.is_sharded(live) and tuple(whole.shape) == sharding.shape_of(live)
        if not fits or not whole.is_contiguous():
            self.fill(name, whole)
            return sharding.cut_like(whole, live, in_place=in_place)
        part = sharding.part_of(live)
        target = sharding.own_memory(part, whole) if in_place else None
        own = target if target is not None else _new_memory(part.region.shape, whole.dtype)
        with self._reading():
            for box in part.region.boxes():
                self._read_box(self._opened[name], whole.view(part.shape), box, own)
        return live if target is not None else sharding.distributed_like(own, live)

    def fill(self, name: str, obj: Any) -> None:
        """Read all of the tensors in an object that was parsed; raises as `cut` does."""
        opened = self._opened[name]
        with self._reading():
            for tensor in tensors_in(obj):
                # What was cut is in memory of its own.
                if sharding.is_sharded(tensor) or tensor.device.type != "cpu":
                    continue
                first = tensor.untyped_storage().data_ptr() - opened.address
                if 0 <= first < opened.file.nbytes:
                    target = opened.buffer[first : first + tensor.untyped_storage().nbytes()]
                    read_range(opened.file, self._readers, first, target)

    def close(self) -> None:
        """Release the shards in memory, on this rank alone: another one may have failed."""
        self._readers = ShardReaders({})
        self._opened.clear()

    def _read_box(self, opened: _Opened, whole: torch.Tensor, box: Box, own: torch.Tensor) -> None:
        size = whole.element_size()
        found = runs(box, whole.shape, size)
        wanted = replace(found, offset=whole.data_ptr() - opened.address + found.offset)
        place = sharding.slices(box.own)
        exact, block = opened.file.exactly(wanted), own[place]
        packed = block if block.is_contiguous() else torch.empty(box.shape, dtype=whole.dtype)
        target = packed.view(-1).view(torch.uint8).numpy().data
        if exact is not None:
            # As this rank, or another one, has written it: packed already.
            one_run = Piece(0, exact.nbytes, at=exact.at)
            read_piece(self._readers(exact.shard), one_run, (0, exact.nbytes), target)
        elif not wanted.levels:
            read_range(opened.file, self._readers, wanted.offset, target)
        else:
            # In memory of its own: another name of the same tensor may be in use in the file's.
            around = torch.empty(wanted.end - wanted.offset, dtype=torch.uint8)
            read_range(opened.file, self._readers, wanted.offset, around.numpy().data)
            shape = [*wanted.counts, wanted.length // size]
            rows = around.view(whole.dtype).as_strided(shape, [*(stride // size for stride in wanted.strides), 1])
            packed.copy_(rows.reshape(box.shape))
        if packed is not block:
            own[place] = packed

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self._on_fault(str(error))
            raise InvalidCheckpoint(self._label, str(error)) from None
        except OSError as error:
            raise fault(self._label, "a shard", error) from None


def _new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose pages are mapped already, where it has many: their faults take longer than the copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MANY_PAGES_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(private_memory(nbytes), dtype=dtype).view(shape)


def open_spread(
    label: str,
    files: Mapping[str, Recorded],
    index: memoryview,
    writers: int,
    rank: int,
    world_size: int,
    without: Collection[str] = (),
) -> SpreadFiles:
    """Verify this rank's share of the shards, so that all ranks together verify all, and return the spread files.

    What they read here is read again only where it is remote, and other ranks than have written it read it: otherwise
    each most likely needs its own shard.

    Args:
        label: What the checkpoint is called in messages.
        files: Its files, by name.
        index: Its index, verified.
        writers: Number of ranks that wrote it.
        rank: Number of this rank.
        world_size: Number of all ranks.
        without: Spread files that nobody will read: of the shards, only the parts with bytes of others are verified.

    Raises:
        InvalidCheckpoint: A shard was altered, or the index cannot be read.
        StorageUnreachable: One cannot be read now.
    """

    def is_own(writer: int) -> bool:
        # Neighbours, because a rank that reads what several have written most likely needs these.
        return min(writer * world_size // writers, world_size - 1) == rank

    if without:
        with _reading_index(label):
            spread = SpreadFiles(label, index_of(index, files), files, {})
        spread.verify(is_own, without)
        return spread
    held: dict[int, memoryview] = {}
    for name, (source, recorded) in files.items():
        writer = shard_rank(name)
        if writer is None or not is_own(writer):
            continue
        algorithm = algorithm_of(recorded)
        try:
            # Ranks that need parts of this shard only will go by these.
            parts_of(name, files)
            if isinstance(source, (Path, memoryview)):
                # A file is mapped, and takes no memory.
                held[writer], actual = read_shared(source, algorithm)
            elif writers == world_size:
                held[writer], actual = read_private(source, algorithm=algorithm)
            else:
                actual = digest_of(source, algorithm)
        except OSError as error:
            raise fault(label, name, error) from None
        except ValueError as error:
            raise InvalidCheckpoint(label, str(error)) from None
        if actual != recorded:
            raise InvalidCheckpoint(label, altered(name, actual))
    with _reading_index(label):
        return SpreadFiles(label, index_of(index, files), files, held)


@contextmanager
def _reading_index(label: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise fault(label, "a shard", error) from None
    except ValueError as error:
        raise InvalidCheckpoint(label, f"{INDEX_NAME} matches its digest but cannot be read: {error}") from None


def open_share(
    label: str, files: Mapping[str, Recorded], index: memoryview, served: Collection[int], on_fault: OnFault
) -> SpreadFiles:
    """Verify this rank's part of a snapshot in memory, and return the spread files, which cannot be read yet.

    Args:
        label: What the snapshot is called in messages.
        files: What the node has of it, by name, in memory.
        index: Its index, verified.
        served: The shards that this rank verifies, for all ranks.
        on_fault: Called with the reason where a read fails after all ranks have agreed to use it.

    Raises:
        InvalidCheckpoint: A shard was altered, or the index cannot be read.
    """
    parts = {}
    for shard in served:
        data, recorded = files[shard_name(shard)]
        assert isinstance(data, memoryview)
        parts[shard] = ShardParts.of(data)
        if parts[shard].digest != recorded:
            raise InvalidCheckpoint(label, altered(shard_name(shard), parts[shard].digest))
    with _reading_index(label):
        return SpreadFiles(label, ShardIndex.from_json(index), {}, {}, parts, on_fault)
