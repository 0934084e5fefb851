"""Files that are spread over shards, as a rank reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.spread_checkpoint import COLUMNS, NAME, ROWS, STATE, WHOLE, files_of, spread

from checkpointing.commit.shard_reading import Recorded
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.safetensors_files import model_state
from checkpointing.files.spread_files import SpreadFiles, open_spread
from checkpointing.format.digest import digest_buffer
from checkpointing.format.shard_index import INDEX_NAME, Piece, ShardIndex, ShardParts, parts_name, shard_name


def checkpoint(pieces: list[Piece]) -> tuple[ShardIndex, dict[str, Recorded], list[bytearray]]:
    """Return the index, the files with their digests, and the shards, which may be altered."""
    index, _ = spread(pieces)
    contents = files_of(pieces)
    files: dict[str, Recorded] = {
        name: (memoryview(data), digest_buffer(memoryview(data)))
        for name, data in contents.items()
        if name != INDEX_NAME
    }
    return index, files, [data for data in contents.values() if isinstance(data, bytearray)]


def opened(pieces: list[Piece]) -> tuple[SpreadFiles, dict[str, torch.Tensor], list[bytearray]]:
    index, files, shards = checkpoint(pieces)
    found = SpreadFiles("here", index, files, {})
    return found, model_state(found.open(NAME)), shards


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Any]:
    """A tensor that is sharded over a mesh of one rank."""
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        yield DTensor.from_local(torch.zeros(6, 4), mesh, [Shard(0)], run_check=False)
    finally:
        dist.destroy_process_group()


def test_a_file_is_parsed_before_its_tensors_are_read() -> None:
    found, state, _ = opened(ROWS)
    assert found.has(NAME) and not found.has("optimizer.pt")
    assert torch.equal(state["norm"], STATE["norm"]) and not state["weight"].any()


@pytest.mark.parametrize("pieces", [ROWS, COLUMNS, WHOLE], ids=["rows", "columns", "exact"])
def test_a_tensor_is_cut_whatever_way_it_was_written_in(pieces: list[Piece], live: Any) -> None:
    found, state, _ = opened(pieces)
    cut: Any = found.cut(NAME, state["weight"], live)
    assert torch.equal(cut._local_tensor, STATE["weight"])
    # In memory of its own, as the file's is released.
    assert cut._local_tensor.data_ptr() != state["weight"].data_ptr()


@pytest.mark.parametrize("pieces", [ROWS, COLUMNS, WHOLE], ids=["rows", "columns", "exact"])
def test_a_tensor_is_read_into_the_live_one_without_a_copy(pieces: list[Piece], live: Any) -> None:
    found, state, _ = opened(pieces)
    memory = live._local_tensor.data_ptr()
    cut: Any = found.cut(NAME, state["weight"], live, in_place=True)
    assert cut is live
    assert torch.equal(live._local_tensor, STATE["weight"]) and live._local_tensor.data_ptr() == memory


def test_a_live_tensor_of_another_type_is_not_written_to(live: Any) -> None:
    found, state, _ = opened(ROWS)
    from torch.distributed.tensor import DTensor

    short: Any = DTensor.from_local(live._local_tensor.half(), live.device_mesh, live.placements, run_check=False)
    cut: Any = found.cut(NAME, state["weight"], short, in_place=True)
    assert torch.equal(cut._local_tensor, STATE["weight"]) and not short._local_tensor.any()


def test_a_tensor_for_one_that_is_not_sharded_is_read_whole() -> None:
    found, state, _ = opened(COLUMNS)
    assert torch.equal(found.cut(NAME, state["weight"], torch.zeros(6, 4)), STATE["weight"])
    found.fill(NAME, {"any": [state["norm"], torch.ones(2), 3]})
    assert torch.equal(state["norm"], STATE["norm"])


def test_damage_that_came_after_the_choice_is_found(live: Any) -> None:
    found, state, shards = opened(ROWS)
    shards[1][3] ^= 1
    with pytest.raises(InvalidCheckpoint, match=r"here: shards/1\.bin was altered"):
        found.cut(NAME, state["weight"], live)


def test_the_digests_of_the_parts_are_verified_themselves(live: Any) -> None:
    index, files, _ = checkpoint(ROWS)
    note = ShardParts.of(memoryview(bytearray(128))).to_json()
    files[parts_name(shard_name(1))] = (memoryview(note), digest_buffer(note))
    found = SpreadFiles("here", index, files, {})
    state = model_state(found.open(NAME))
    with pytest.raises(InvalidCheckpoint, match=r"shards/1\.parts\.json was altered"):
        found.cut(NAME, state["weight"], live)


def test_a_shard_that_is_missing_is_named() -> None:
    index, files, _ = checkpoint(ROWS)
    del files["shards/1.bin"]
    found = SpreadFiles("here", index, files, {})
    with pytest.raises(InvalidCheckpoint, match=r"shards/1\.bin is not among its files"):
        found.fill(NAME, model_state(found.open(NAME)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_together_verify_all_shards(world_size: int) -> None:
    for damaged in range(2):
        index, files, shards = checkpoint(ROWS)
        shards[damaged][0] ^= 1
        problems = []
        for rank in range(world_size):
            try:
                open_spread("here", files, memoryview(index.to_json()), 2, rank, world_size)
            except InvalidCheckpoint as error:
                problems.append(str(error))
        (problem,) = problems
        assert problem.startswith(
            f"here: shards/{damaged}.bin was altered: its digest is not the one that was recorded"
        )


@pytest.mark.parametrize("damaged", [0, 1])
def test_of_shards_only_the_parts_that_will_be_read_are_verified(damaged: int) -> None:
    index, files, shards = checkpoint(ROWS)
    shards[damaged][1] ^= 1

    def problems(without: str) -> list[str]:
        found = []
        for rank in range(2):
            try:
                open_spread("here", files, memoryview(index.to_json()), 2, rank, 2, (without,))
            except InvalidCheckpoint as error:
                found.append(str(error))
        return found

    assert problems("optimizer.pt") == [f"here: shards/{damaged}.bin was altered: a part of it has another digest"]
    assert problems(NAME) == []


def test_an_index_that_cannot_be_read_is_damage() -> None:
    _, files, _ = checkpoint(ROWS)
    with pytest.raises(InvalidCheckpoint, match=r"shards/index\.json matches its digest but cannot be read"):
        open_spread("here", files, memoryview(b"{}"), 2, 0, 1)


@pytest.mark.parametrize("damaged", [0, 1])
def test_damaged_digests_are_found_before_the_ranks_agree(damaged: int) -> None:
    """Other ranks go by them when they read parts of the shard, which is too late to choose another checkpoint."""
    index, files, _ = checkpoint(ROWS)
    note = ShardParts.of(memoryview(bytearray(256))).to_json()
    files[parts_name(shard_name(damaged))] = (memoryview(note), digest_buffer(note))
    open_spread("here", files, memoryview(index.to_json()), 2, 1 - damaged, 2)
    with pytest.raises(InvalidCheckpoint, match=rf"shards/{damaged}\.parts\.json was altered"):
        open_spread("here", files, memoryview(index.to_json()), 2, damaged, 2)
