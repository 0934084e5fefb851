"""Whether the last step of a loop is committed at its end."""

from __future__ import annotations

import pytest
from helpers.thread_ranks import run_ranks

from checkpointing.manager.step_saves import LastStep
from checkpointing.process.ranks import Ranks


@pytest.mark.parametrize(
    ("missing", "unfit", "written", "decision"),
    [
        ((False, False), (False, False), False, False),
        ((True, True), (False, False), False, True),
        ((True, False), (False, False), False, True),  # the other machine had memory for it
        ((True, True), (False, True), False, False),
        ((False, False), (True, True), False, False),
        ((True, True), (False, False), True, False),  # nobody had memory for it, so rank 0 has written it itself
        ((True, True), (True, True), True, False),
    ],
)
def test_all_ranks_commit_it_or_none_does(
    missing: tuple[bool, bool],
    unfit: tuple[bool, bool],
    written: bool,
    decision: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decide(ranks: Ranks) -> bool:
        last = LastStep()
        last.ended(7, 56, None)
        written_here = written and ranks.is_first
        return last.is_to_be_committed(
            ranks, missing=missing[ranks.rank], unfit=unfit[ranks.rank], written=written_here
        )

    assert run_ranks(decide) == [decision] * 2
    warned = "step 7 is not committed: close() was called in the middle of a later step" in caplog.text
    assert warned is (any(missing) and any(unfit) and not written)
