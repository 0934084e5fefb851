from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.data import CursorBatchSampler, CursorDataLoader


def global_steps(n: int, batch: int, world: int, accumulation: int, epoch: int, first_step: int = 0) -> list[list[int]]:
    """Sample ids of each global step, put together from what every rank draws."""
    per_rank = []
    for rank in range(world):
        sampler = CursorBatchSampler(n, batch, rank, world, accumulation, seed=7)
        sampler.set_epoch(epoch)
        sampler.start_at(first_step * accumulation)
        per_rank.append(list(sampler))
    micro = list(zip(*per_rank, strict=True))
    flat = [[index for batch_ids in ranks for index in batch_ids] for ranks in micro]
    return [list(chain(*flat[i : i + accumulation])) for i in range(0, len(flat), accumulation)]


@given(st.integers(1, 60), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_every_sample_is_drawn_and_only_the_filling_twice(n: int, batch: int, world: int, epoch: int) -> None:
    drawn = list(chain(*global_steps(n, batch, world, 2, epoch)))
    assert sorted(drawn[:n]) == list(range(n))
    assert len(drawn) < n + batch * world * 2


@given(st.integers(1, 60), st.integers(0, 20))
def test_resuming_draws_what_is_left(n: int, step: int) -> None:
    whole = global_steps(n, 2, 2, 2, epoch=1)
    assert global_steps(n, 2, 2, 2, epoch=1, first_step=min(step, len(whole))) == whole[step:]


@given(st.integers(1, 60))
def test_a_step_has_the_same_samples_on_any_world_size(n: int) -> None:
    shapes = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)]
    steps = [[sorted(step) for step in global_steps(n, *shape, epoch=2)] for shape in shapes]
    assert all(other == steps[0] for other in steps)


def test_a_skip_is_used_once() -> None:
    loader = CursorDataLoader(list(range(8)), CursorBatchSampler(8, 2, 0, 1, shuffle=False))
    loader.start_at(3)
    assert [batch.tolist() for batch in loader] == [[6, 7]]
    assert len(list(loader)) == 4


@pytest.mark.parametrize("n", [8, 9, 15, 16])
def test_drop_last_leaves_out_what_fills_no_global_batch(n: int) -> None:
    sampler = CursorBatchSampler(n, 2, 0, 2, accumulation=2, drop_last=True)
    assert sampler.steps_per_epoch == n // 8
    assert len(set(sampler.epoch_order().tolist())) == n // 8 * 8


def test_too_little_data_is_told() -> None:
    with pytest.raises(ValueError, match="has 0 samples"):
        CursorBatchSampler(0, 2, 0, 1)
    with pytest.raises(ValueError, match="at least 8 are needed"):
        CursorBatchSampler(7, 2, 0, 2, accumulation=2, drop_last=True)
