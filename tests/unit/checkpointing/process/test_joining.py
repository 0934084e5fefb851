"""Ranks that need not make the same steps are refused at the first one, instead of waiting for each other."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.algorithms.join import Join

from checkpointing.errors import CheckpointError
from checkpointing.process.joining import check_same_steps


def context(*, enable: bool = True, throws: bool = False) -> Any:
    """One without a process group."""
    made: Any = Join.__new__(Join)
    made._enable, made._throw_on_early_termination = enable, throws
    # Nobody else is left.
    made._get_num_nonjoined_procs, made._join_hooks = lambda: 0, []
    return made


def test_a_step_inside_a_join_is_refused_and_one_behind_it_is_not() -> None:
    with context(), context(), pytest.raises(CheckpointError, match=r"inside torch's Join .*drop_last=True"):
        check_same_steps()
    check_same_steps()


@pytest.mark.parametrize("options", [{"enable": False}, {"throws": True}])
def test_a_join_in_which_all_ranks_end_together_is_none(options: Any) -> None:
    with context(**options):
        check_same_steps()


def test_an_exception_closes_it() -> None:
    with pytest.raises(KeyError), context():
        raise KeyError
    check_same_steps()
