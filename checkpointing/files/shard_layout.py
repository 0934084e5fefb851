"""What each rank writes of sharded state: what no node holds whole is packed into shards, nothing is copied twice."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import Extent, FileImage
from checkpointing.format.shard_index import ALIGNMENT, Piece, ShardIndex, SpreadFile, shard_name
from checkpointing.process.ranks import Ranks

# What all ranks need of the first one's shard. With more, such as all weights under ZeRO 1 and 2, the storage is a
# better place to read it from than one rank.
_MOST_COMMON_BYTES = 64 * 1024 * 1024
_ZEROS = torch.zeros(ALIGNMENT, dtype=torch.uint8)
# File, offset, strides and shape of bytes that a rank copies.
_Place = tuple[str, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Holding:
    """Bytes of a file that a rank holds."""

    name: str
    piece: Piece  # without a place in a shard
    content: bytes | Extent
    is_common: bool  # every reader needs them


class ShardLayout:
    """Lays out, together with all ranks, state that no node holds whole.

    Args:
        ranks: This rank, with a group that only the copy thread uses.

    Attributes:
        sizes: Bytes of each rank's shard, by rank, as they were last laid out.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # What all ranks held when this was last laid out, by their digests: it seldom changes.
        self._digests: list[bytes] = []
        self._index = ShardIndex({})
        self._index_file = b""
        self.sizes: list[int] = []
        self._gaps: list[tuple[int, int]] = []
        self._num_common = 0

    def lay_out(self, images: Sequence[FileImage]) -> tuple[list[FileImage], bytes, ShardedSave]:
        """Pack this rank's share.

        What is equal on all ranks is rank 0's to write.

        Returns:
            The shards of this node, those of other ranks without contents; the index of all shards, on the first rank
            of each node; and the save.

        Raises:
            CheckpointError: The ranks together do not hold all of a file.
        """
        ranks = self._ranks
        holdings = list(_holdings(images, with_common=ranks.is_first))
        self._place(images, holdings)
        own = FileImage(shard_name(ranks.rank), self.sizes[ranks.rank])
        first = ranks.rank - ranks.local_rank
        local = range(first, first + ranks.local_world_size)
        for holding in holdings:
            placed = self._index.files[holding.name].exactly(holding.piece)
            assert placed is not None
            if placed.shard != ranks.rank:
                continue
            if isinstance(holding.content, bytes):
                own.literals.append((placed.at, holding.content))
            else:
                content = holding.content
                own.own.append(Extent(placed.at, content.source.reshape(-1), of=content.of))
        # Written as well: every byte of a file is one that some rank has put there.
        own.own.extend(Extent(first, _ZEROS[: last - first]) for first, last in self._gaps)
        shards = [own if rank == ranks.rank else FileImage(shard_name(rank), self.sizes[rank]) for rank in local]
        identity = ranks.broadcast(uuid.uuid4().hex[:12])
        names = tuple(map(shard_name, range(ranks.world_size)))
        return shards, self._index_file, ShardedSave(identity, names, self._num_common <= _MOST_COMMON_BYTES)

    def _place(self, images: Sequence[FileImage], holdings: Sequence[_Holding]) -> None:
        """Agree with all ranks on where everything is."""
        pieces: dict[str, tuple[list[Piece], list[Piece]]] = {image.name: ([], []) for image in images}
        for holding in holdings:
            pieces[holding.name][not holding.is_common].append(holding.piece)
        mine = ShardIndex({image.name: SpreadFile(image.nbytes, *map(tuple, pieces[image.name])) for image in images})
        digests = self._ranks.gather(hashlib.blake2b(mine.to_json(), digest_size=16).digest())
        if digests == self._digests:
            return
        try:
            self._index, self.sizes = ShardIndex.laid_out(self._ranks.gather(mine))
        except ValueError as error:
            raise CheckpointError(f"the ranks together do not hold all of the sharded state: {error}") from None
        self._digests = digests
        self._gaps = self._index.gaps(self._ranks.rank)
        self._num_common = sum(piece.nbytes for file in self._index.files.values() for piece in file.common)
        self._index_file = self._index.to_json() if self._ranks.local_rank == 0 else b""


def _holdings(images: Sequence[FileImage], *, with_common: bool) -> Iterator[_Holding]:
    for image in images:
        if with_common:
            for offset, data in image.literals:
                if data:
                    yield _Holding(image.name, Piece(offset, len(data)), data, is_common=True)
            for offset, tensor in (*image.tensors, *image.alone):
                if tensor.numel():
                    yield _Holding(image.name, Piece(offset, tensor.numel()), Extent(offset, tensor), is_common=True)
        for extent in image.own:
            if extent.source.numel():
                *counts, length = extent.source.shape
                levels = tuple(zip(counts, extent.strides, strict=True))
                yield _Holding(image.name, Piece(extent.offset, length, levels), extent, is_common=False)


class LocalWriters:
    """Leaves bytes that several ranks of a node hold to the first of these.

    A mesh says which of its own ranks copies what. Where a tensor is on one mesh of several with the same contents, as
    a norm that FSDP2 shards and tensor parallelism does not, each of these would copy it.

    Args:
        ranks: This rank, with a group that only the copy thread uses.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # What the ranks held when they last compared it: it seldom changes.
        self._digests: list[bytes] = []
        self._elsewhere: frozenset[_Place] = frozenset()

    def take_turns(self, images: Sequence[FileImage]) -> None:
        """Take from the images what an earlier rank of this node copies; all ranks call this together."""
        mine = [_place_of(image, extent) for image in images for extent in image.own]
        digests = self._ranks.gather(hashlib.blake2b(repr(mine).encode(), digest_size=16).digest())
        if digests != self._digests:
            first = self._ranks.rank - self._ranks.local_rank
            before = self._ranks.gather(mine)[first : self._ranks.rank]
            self._elsewhere, self._digests = frozenset(chain.from_iterable(before)), digests
        for image in images:
            image.own[:] = [extent for extent in image.own if _place_of(image, extent) not in self._elsewhere]


def _place_of(image: FileImage, extent: Extent) -> _Place:
    return image.name, extent.offset, extent.strides, tuple(extent.source.shape)
