"""What is saved of each rank where the ranks differ."""

from __future__ import annotations

import torch
from helpers.thread_ranks import run_ranks

from checkpointing.format.layout import EXTRA_STATE_NAME, OPTIONS_NAME, SCHEDULER_NAME
from checkpointing.process.ranks import Ranks
from checkpointing.state.replicas import OBJECTS, differing_buffers, numbers_of, own_objects


def test_objects_are_compared_by_their_bytes_also_where_a_rank_has_none() -> None:
    """All ranks compare equally many numbers: a stage may have no extra state."""
    one, same, other = ({SCHEDULER_NAME: data, "training.pt": b"x"} for data in (b"a", b"a", b"b"))
    assert numbers_of(one) == numbers_of(same) != numbers_of(other)
    assert len(numbers_of({})) == len(numbers_of(one)) == len(OBJECTS) and not any(numbers_of({}))


def test_a_rank_writes_its_own_of_what_differs() -> None:
    small = {SCHEDULER_NAME: b"a", EXTRA_STATE_NAME: b"b", "training.pt": b"c"}
    differing = frozenset({SCHEDULER_NAME, OPTIONS_NAME, "training.pt"})
    assert own_objects(small, differing, 3) == {"rank_state_3_scheduler.pt": b"a"}


def test_buffers_are_compared_among_the_ranks_that_have_them() -> None:
    def compare(ranks: Ranks) -> set[str]:
        buffers = {"shared": torch.ones(2), "counted": torch.tensor(ranks.rank % 2)}
        # Of another stage.
        return differing_buffers(buffers if ranks.rank < 2 else {"own": torch.ones(3, 2).t()}, ranks)

    assert run_ranks(compare, 3) == [{"counted"}] * 3
