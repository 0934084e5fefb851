"""Which rank draws which batch, also as the world size or the micro-batch size changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from checkpointing.data.dealing import Dealing, DealtBatchSampler, RecutBatchSampler, StepLayout
from checkpointing.data.position import Position
from checkpointing.errors import CheckpointError
from checkpointing.transformers.job_shape import fit_layout


def plain(samples: int = 20, batch_size: int = 2, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last)


@pytest.mark.parametrize("samples", [16, 17, 20, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_number_of_ranks_computes_the_same(samples: int, drop_last: bool) -> None:
    def of(world_size: int) -> list[tuple[int, list[int]]]:
        found = []
        for rank in range(world_size):
            dealing = Dealing(4, rank, world_size)
            dealt = DealtBatchSampler(plain(samples, drop_last=drop_last), dealing)
            mine = [(number, batch) for number, batch in enumerate(dealt) if dealing.is_ours(number)]
            # All that have as many virtual ranks have as many micro-batches.
            assert len(mine) * dealing.largest == len(dealt) * len(dealing.block)
            found += mine
        return sorted(found)

    assert len({str(of(world_size)) for world_size in (1, 2, 3, 4)}) == 1
    batches = [batch for _, batch in of(1)]
    assert len(batches) % 4 == 0 and all(len(batch) == 2 for batch in batches)
    if not drop_last and samples:
        # An epoch is filled up from its beginning.
        assert [index for batch in batches for index in batch][:samples] == list(range(samples))


def test_a_rank_computes_one_virtual_rank_after_the_other() -> None:
    dealing = Dealing(5, 0, 2)
    assert list(dealing.block) == [0, 1, 2] and dealing.largest == 3
    # Two rounds, as they are drawn.
    drawn = ["0a", "1a", "2a", "0b", "1b", "2b"]
    assert dealing.arranged(drawn) == [
        (0, 0, "0a"),
        (0, 1, "0b"),
        (1, 0, "1a"),
        (1, 1, "1b"),
        (2, 0, "2a"),
        (2, 1, "2b"),
    ]
    assert Dealing(5, 1, 2).arranged(["3a", "4a"]) == [(3, 0, "3a"), (4, 0, "4a")]


def test_positions_are_those_of_all() -> None:
    dealing = Dealing(5, 1, 2)
    assert dealing.count_of_all(6) == 10 and dealing.count_here(10) == 6


def test_an_order_that_depends_on_the_number_of_ranks_is_refused() -> None:
    class Own(BatchSampler):
        pass

    with pytest.raises(CheckpointError, match="virtual ranks need a loader that deals the same batches"):
        DealtBatchSampler(Own(RandomSampler(range(4)), 2, False), Dealing(2))
    sampler = DistributedSampler(range(4), 2, 0)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(CheckpointError, match="with DistributedSampler does not"):
        DealtBatchSampler(BatchSampler(sampler, 2, False), Dealing(2))
    # Such as one that groups samples of equal length by how many a rank draws for a step.
    with pytest.raises(CheckpointError, match="with list does not"):
        DealtBatchSampler(BatchSampler([0, 1], 2, False), Dealing(2))


LAYOUTS = st.builds(StepLayout, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


def prepared(num_samples: int, layout: StepLayout, rank: int, epoch: int, drop_last: bool = False) -> Any:
    """As the Trainer and accelerate make it."""
    sampler = SeedableRandomSampler(range(num_samples), data_seed=7)
    sampler.set_epoch(epoch)
    batches = BatchSampler(sampler, layout.batch_size, drop_last)
    return batches if layout.world_size == 1 else BatchSamplerShard(batches, layout.world_size, rank)


def steps(samplers: list[Any], layout: StepLayout) -> list[list[int]]:
    """The samples of each optimizer step, put together from what every rank draws."""
    rounds = [list(itertools.chain(*batches)) for batches in zip(*map(list, samplers), strict=True)]
    size = layout.accumulation
    return [list(itertools.chain(*rounds[i : i + size])) for i in range(0, len(rounds), size)]


@given(st.integers(1, 70), LAYOUTS, st.integers(0, 3), st.booleans())
def test_another_layout_gives_each_step_the_same_samples(n: int, was: StepLayout, epoch: int, drop_last: bool) -> None:
    whole = steps([prepared(n, was, rank, epoch, drop_last) for rank in range(was.world_size)], was)
    for world_size in range(1, was.samples_per_step + 1):
        share, rest = divmod(was.samples_per_step, world_size)
        if rest:
            continue
        for batch_size in (size for size in range(1, share + 1) if share % size == 0):
            now = StepLayout(world_size, batch_size, share // batch_size)
            recut = [
                RecutBatchSampler(prepared(n, now, rank, epoch, drop_last), was, now, rank)
                for rank in range(world_size)
            ]
            found = steps(recut, now)
            assert [step[: len(other)] for step, other in zip(found, whole, strict=True)] == whole
            # Filled only where the ranks could not share the last step.
            assert all(len(step) - len(other) < world_size for step, other in zip(found, whole, strict=True))
            assert {len(sampler) for sampler in recut} == {len(list(sampler)) for sampler in recut}


@given(st.integers(1, 70), LAYOUTS, st.integers(0, 3), st.booleans(), st.integers(1, 4))
def test_samples_that_ranks_cannot_share_equally_are_dealt_as_evenly_as_possible(
    n: int, was: StepLayout, epoch: int, drop_last: bool, largest: int
) -> None:
    whole = steps([prepared(n, was, rank, epoch, drop_last) for rank in range(was.world_size)], was)
    for world_size in range(2, was.samples_per_step):
        now = fit_layout(was, world_size, largest, uneven=True)
        if now is None or not now.uneven_samples:
            continue
        assert now.samples_per_step == was.samples_per_step and now.batch_size <= min(largest, was.batch_size)
        samplers = [
            RecutBatchSampler(prepared(n, now, rank, epoch, drop_last), was, now, rank) for rank in range(world_size)
        ]
        drawn = [list(sampler) for sampler in samplers]
        # Every rank makes as many passes, as DDP needs.
        assert {len(sampler) for sampler in samplers} == {len(batches) for batches in drawn} and len(
            set(map(len, drawn))
        ) == 1
        assert all(1 <= len(batch) <= now.batch_size for batches in drawn for batch in batches)
        for number, step in enumerate(whole):
            shares = [
                [
                    sample
                    for index, batch in enumerate(batches[number * now.accumulation : (number + 1) * now.accumulation])
                    if number * now.accumulation + index not in sampler.fillers
                    for sample in batch
                ]
                for sampler, batches in zip(samplers, drawn, strict=True)
            ]
            assert list(itertools.chain(*shares)) == step
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_order_that_depends_on_the_division_is_refused() -> None:
    class Pairs(BatchSampler):
        pass

    pairs = Pairs(RandomSampler(range(8)), 2, False)
    with pytest.raises(CheckpointError, match=r"order of Pairs depends on the number of ranks.* were 2 x 2"):
        RecutBatchSampler(pairs, StepLayout(2, 2, 1), StepLayout(1, 4, 1), 0)


@pytest.mark.parametrize(
    ("was", "now", "consumed", "expected"),
    [
        (StepLayout(2, 2, 2), StepLayout(2, 2, 2), 6, 6),
        (StepLayout(2, 2, 2), StepLayout(1, 2, 4), 6, 12),
        (StepLayout(1, 2, 4), StepLayout(2, 2, 2), 12, 6),
        # The epoch's last step was shorter than the others.
        (StepLayout(1, 2, 4), StepLayout(2, 2, 2), 39, 20),
        (StepLayout(1, 1, 1), StepLayout(1, 1, 3), 99, 30),
        (StepLayout(4, 2, 1), StepLayout(3, 2, 2, 8), 7, 14),
        (StepLayout(3, 2, 2, 8), StepLayout(4, 2, 1), 14, 7),
    ],
)
def test_a_position_counts_the_micro_batches_of_now(
    was: StepLayout, now: StepLayout, consumed: int, expected: int
) -> None:
    recorded = Position(1, consumed, order="digest", layout=was)
    found = recorded.recut(now, steps_per_epoch=10)
    assert (found.epoch, found.consumed) == (1, expected)
    # The digest is of the indices of other micro-batches.
    assert found.order == ("digest" if was == now else None)


def test_a_position_without_a_layout_cannot_be_recut() -> None:
    with pytest.raises(ValueError, match="does not say how steps were divided"):
        Position(0, 1).recut(StepLayout(1, 1, 1), 10)
