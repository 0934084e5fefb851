"""A checkpoint whose model is spread over the shards of two ranks, made without process groups."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from safetensors.torch import save

from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import Manifest, SnapshotInfo
from checkpointing.format.shard_index import (
    INDEX_NAME,
    Piece,
    ShardIndex,
    ShardParts,
    SpreadFile,
    parts_name,
    shard_name,
)
from checkpointing.storage import Storage

# One of each rank, or several.
Pieces = Sequence[Piece | tuple[Piece, ...]]
NAME = "model.safetensors"
STATE = {"norm": torch.arange(3.0) + 50, "weight": torch.arange(24.0).view(6, 4)}
FILE = save(STATE)
HEADER = 8 + int.from_bytes(FILE[:8], "little")


def offset_of(name: str) -> int:
    return HEADER + int(json.loads(FILE[8:HEADER])[name]["data_offsets"][0])


# Rows, and columns, of `weight`; and all of it.
ROWS = [Piece(offset_of("weight") + 48 * half, 48) for half in range(2)]
COLUMNS = [Piece(offset_of("weight") + 8 * half, 8, ((6, 16),)) for half in range(2)]
WHOLE = [Piece(offset_of("weight"), 96)]


def spread(pieces: Pieces) -> tuple[ShardIndex, list[bytearray]]:
    """Return the index and the shards: rank 0 has the header and `norm`, and each rank a piece of `weight`."""
    common = (Piece(0, HEADER), Piece(offset_of("norm"), 12))
    holdings = [
        ShardIndex(
            {NAME: SpreadFile(len(FILE), common if rank == 0 else (), own if isinstance(own, tuple) else (own,))}
        )
        for rank, own in enumerate(pieces)
    ]
    index, sizes = ShardIndex.laid_out(holdings)
    shards = [bytearray(nbytes) for nbytes in sizes]
    for piece in (*index.files[NAME].common, *index.files[NAME].pieces):
        runs = (piece.run_offset(number) for number in range(piece.num_runs))
        data = b"".join(FILE[offset : offset + piece.length] for offset in runs)
        shards[piece.shard][piece.at : piece.at + piece.nbytes] = data
    return index, shards


def files_of(pieces: Pieces) -> dict[str, bytes | bytearray]:
    """Return the files of the checkpoint, by name."""
    index, shards = spread(pieces)
    files: dict[str, bytes | bytearray] = {INDEX_NAME: index.to_json(), "rng_state.pth": b"generators"}
    for rank, shard in enumerate(shards):
        files[shard_name(rank)] = shard
        files[parts_name(shard_name(rank))] = ShardParts.of(memoryview(shard)).to_json()
    return files


def commit_spread(storage: Storage, step: int, pieces: Pieces) -> Manifest:
    """Commit the checkpoint."""
    staged = [
        StagedFile(name, [memoryview(data)], lambda data=data: digest_buffer(memoryview(data)))  # type: ignore[misc]
        for name, data in files_of(pieces).items()
    ]
    return commit_snapshot(storage, SnapshotInfo("run", 1, step, len(pieces), step), staged)
