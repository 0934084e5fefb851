"""Positions in data loaders: saved together with a step, and resumed from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointing.data.cursor import LoaderCursor
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.torch_files import torch_bytes
from checkpointing.manager.data_positions import DataPositions
from checkpointing.process.ranks import Ranks


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)


def drawn(positions: DataPositions, count: int, generator: torch.Tensor | None = None) -> list[list[int]]:
    torch.manual_seed(3)
    if generator is not None:
        torch.random.set_rng_state(generator)
    return [batch.tolist() for (batch,) in itertools.islice(positions.batches(loader()), count)]


def point(files: dict[str, bytes], world_size: int = 1) -> LoadedCheckpoint:
    return LoadedCheckpoint(
        "/runs/checkpoint-4",
        step=4,
        world_size=world_size,
        samples_consumed=8,
        files={name: memoryview(bytearray(data)) for name, data in files.items()},
        path=None,
        private=True,
    )


def test_batches_continue_where_the_checkpoint_was_made() -> None:
    whole = drawn(DataPositions(Ranks()), 9)
    # Across the end of an epoch, which has three batches.
    before, after = DataPositions(Ranks()), DataPositions(Ranks())
    assert drawn(before, 4) == whole[:4]
    files, generator = {name: write() for name, write in before.files(4).items()}, torch.random.get_rng_state()
    after.restore(point(files))
    assert drawn(after, 5, generator) == whole[4:]


def test_nothing_is_saved_where_no_loader_is_followed() -> None:
    positions = DataPositions(Ranks())
    assert positions.files(4) == {} and positions.read(point({})) == []
    drawn(positions, 1)
    assert len(positions.files(4)) == 1
    positions.forget()
    assert positions.files(4) == {}


def test_a_rank_that_is_new_takes_rank_0s_positions() -> None:
    written = DataPositions(Ranks())
    drawn(written, 1)
    files = {name: write() for name, write in written.files(4).items()}
    assert len(DataPositions(Ranks(1, 2)).read(point(files))) == 1


def test_ranks_that_draw_the_same_samples_save_once_and_are_found_on_another_mesh() -> None:
    """Two tensor parallel groups were resumed by two ranks of which the second read the first group's position."""
    files: dict[str, bytes] = {}
    for rank in range(4):
        positions = DataPositions(Ranks(rank, 4))
        cursor = LoaderCursor(loader(), seed=0, rank=rank // 2)
        positions.follow(cursor, group_size=2)
        cursor.set_epoch(rank // 2)
        found = {name: write() for name, write in positions.files(4).items()}
        assert list(found) == ([f"data_state_{rank // 2}.pth"] if rank % 2 == 0 else [])
        files |= found
    for rank, group_size in ((1, 1), (2, 2), (3, 2)):
        reader = DataPositions(Ranks(rank, 2 * group_size))
        reader.follow(LoaderCursor(loader(), seed=0, rank=1), group_size)
        assert [position["epoch"] for position in reader.read(point(files))] == [1]


def test_a_file_that_holds_no_positions_is_refused() -> None:
    written = DataPositions(Ranks())
    drawn(written, 1)
    (name,) = written.files(4)
    with pytest.raises(InvalidCheckpoint, match=name):
        written.read(point({name: torch_bytes({"no": "list"})}))
    written.restore(point({name: torch_bytes([{"epoch": "text"}])}))
    written.forget()
    with pytest.raises(CheckpointError, match=r"position in .* cannot be parsed"):
        drawn(written, 1)


@pytest.mark.parametrize(
    "several",
    [
        lambda one, two: [one, two],
        lambda one, two: {"text": one, "images": two},
        lambda one, two: (one, two),
        zip,
        itertools.chain,
        lambda one, _: iter(one),
        lambda one, _: itertools.cycle(one),
        lambda one, _: (batch for batch in one),
        lambda one, _: enumerate(one),
    ],
)
def test_several_loaders_are_followed_one_by_one(several: Any) -> None:
    for follow in (DataPositions(Ranks()).batches, lambda loaders: DataPositions(Ranks()).dealt(loaders, 1)):
        with pytest.raises(TypeError, match=r"not a \w+: call manager.batches once for each loader.*zip\("):
            follow(several(loader(), loader()))


def test_two_loaders_continue_each_from_its_own_position() -> None:
    def run(positions: DataPositions, count: int, generator: torch.Tensor | None = None) -> list[Any]:
        torch.manual_seed(3)
        if generator is not None:
            torch.random.set_rng_state(generator)
        pairs = zip(positions.batches(loader()), positions.batches(loader()), strict=True)
        return [[batch[0].tolist() for batch in pair] for pair in itertools.islice(pairs, count)]

    whole = run(DataPositions(Ranks()), 9)
    before, after = DataPositions(Ranks()), DataPositions(Ranks())
    run(before, 4)
    files, generator = {name: write() for name, write in before.files(4).items()}, torch.random.get_rng_state()
    after.restore(point(files))
    assert run(after, 5, generator) == whole[4:]
