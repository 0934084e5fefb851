"""Shards that ranks read from each other's memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.spread_checkpoint import COLUMNS, NAME, ROWS, STATE, files_of
from helpers.thread_ranks import run_ranks

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.shard_reading import CommonPieces
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.safetensors_files import model_state
from checkpointing.files.spread_files import SpreadFiles, open_share
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import INDEX_NAME, Piece, shard_name
from checkpointing.process.ranks import Ranks
from checkpointing.resume.memory_shards import HeldShards, ShardExchange, connect

FAULTS: list[str] = []


def snapshot(pieces: Sequence[Piece], *shards: int) -> OfferedSnapshot:
    """What a node holds that has these shards."""
    names = {INDEX_NAME, *map(shard_name, shards)}
    files = {name: memoryview(data) for name, data in files_of(pieces).items() if name in names}
    digests = {name: digest_buffer(view) for name, view in files.items()}
    return OfferedSnapshot(SnapshotInfo("run", 1, 7, 2, 7), files, digests, save="ab")


def opened(share: OfferedSnapshot, *served: int) -> SpreadFiles:
    files = {name: (view, share.digests[name]) for name, view in share.files.items()}
    return open_share("here", files, share.files[INDEX_NAME], served, FAULTS.append)


def read_all(spread: SpreadFiles) -> dict[str, torch.Tensor]:
    state = model_state(spread.open(NAME))
    spread.fill(NAME, state)
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("pieces", [ROWS, COLUMNS])
@pytest.mark.parametrize(
    ("shards", "servers"),
    [
        # Each has its own; a node that is new has none; the ranks have changed places; there is one rank more.
        ([(0,), (1,)], {0: 0, 1: 1}),
        ([(0, 1), ()], {0: 0, 1: 0}),
        ([(), (0, 1)], {0: 1, 1: 1}),
        ([(1,), (0,)], {0: 1, 1: 0}),
        ([(0,), (1,), ()], {0: 0, 1: 1}),
    ],
)
def test_every_rank_reads_all_shards_wherever_they_are(
    shards: list[tuple[int, ...]],
    servers: dict[int, int],
    pieces: list[Piece],
) -> None:
    held = HeldShards(1, "ab", tuple(node for node, mine in enumerate(shards) if mine), servers)

    def read(ranks: Ranks) -> dict[str, torch.Tensor]:
        share = snapshot(pieces, *shards[ranks.rank])
        served = [shard for shard, server in servers.items() if server == ranks.rank]
        spread = opened(share, *served)
        connect(spread, ranks, held, share if shards[ranks.rank] else None)
        found = read_all(spread)
        spread.end_reading()
        # Once.
        spread.end_reading()
        spread.close()
        return found

    for found in run_ranks(read, len(shards), per_node=1):
        assert isinstance(found, dict), found
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in STATE.items()
        }


def test_ranks_of_one_node_read_what_each_of_them_has_verified() -> None:
    held = HeldShards(1, "ab", (0,), {0: 0, 1: 1})
    share = snapshot(ROWS, 0, 1)

    def read(ranks: Ranks) -> object:
        spread = opened(share, ranks.rank)
        connect(spread, ranks, held, share)
        state = read_all(spread)
        spread.end_reading()
        return state["weight"].tolist()

    assert run_ranks(read) == [STATE["weight"].tolist()] * 2


def test_what_was_altered_on_its_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldShards(1, "ab", (0,), {0: 0, 1: 0})
    monkeypatch.setattr(CommonPieces, "read_from", lambda reader, index: {})
    real = ShardExchange.reader
    FAULTS.clear()

    def reader(self: ShardExchange, server: int, shard: int) -> object:
        def read(start: int, memory: memoryview) -> None:
            real(self, server, shard)(start, memory)
            memory[-1] ^= 1

        return read

    monkeypatch.setattr(ShardExchange, "reader", reader)

    def read(ranks: Ranks) -> object:
        share = snapshot(ROWS, *((0, 1) if ranks.is_first else ()))
        spread = opened(share, *((0, 1) if ranks.is_first else ()))
        connect(spread, ranks, held, share if ranks.is_first else None)
        try:
            return read_all(spread)["weight"].tolist()
        finally:
            spread.end_reading()

    first, second = run_ranks(read, per_node=1)
    assert first == STATE["weight"].tolist()
    assert isinstance(second, InvalidCheckpoint) and "a part of it has another digest" in str(second)
    assert FAULTS == ["shards/0.bin was altered: a part of it has another digest"]


def test_a_rank_verifies_the_shards_that_it_serves() -> None:
    share = snapshot(ROWS, 0, 1)
    altered = bytearray(share.files[shard_name(1)])
    altered[3] ^= 1
    share.files[shard_name(1)] = memoryview(altered)
    assert set(opened(share, 0).served) == {0}
    with pytest.raises(InvalidCheckpoint, match=r"shards/1\.bin was altered"):
        opened(share, 1)
    share.files[INDEX_NAME] = memoryview(b"{}")
    with pytest.raises(InvalidCheckpoint, match="matches its digest but cannot be read"):
        opened(share, 0)
