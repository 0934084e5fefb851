"""Which micro-batches are whose."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from checkpointing.data.dealing import Dealing, DealtBatchSampler
from checkpointing.errors import CheckpointError


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
