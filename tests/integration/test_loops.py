"""Loops whose ranks do not do the same at every step: resumed exactly, or refused by what to do instead."""

from __future__ import annotations

from pathlib import Path

from infra.torchrun import torchrun

PROGRAM = Path(__file__).parent / "loop_program.py"


def test_local_sgd_with_moments_of_each_rank_is_resumed_in_the_middle_of_a_local_phase(tmp_path: Path) -> None:
    whole = torchrun(PROGRAM, "local_sgd", tmp_path / "whole", ranks=2)
    killed = torchrun(PROGRAM, "local_sgd", tmp_path / "killed", 11, ranks=2)
    resumed = torchrun(PROGRAM, "local_sgd", tmp_path / "killed", ranks=2)
    assert whole.returncode == resumed.returncode == 0, whole.stderr + resumed.stderr
    assert killed.returncode != 0
    # Step 9 is the first one after an average.
    assert "resumed from step 9" in resumed.stderr
    assert resumed.stdout == whole.stdout and whole.stdout.startswith("weights ")


def test_ranks_that_may_make_different_numbers_of_steps_are_refused_at_once(tmp_path: Path) -> None:
    """The last rank with data waited for the others for ever."""
    ended = torchrun(PROGRAM, "join", tmp_path, ranks=2, timeout_s=60)
    assert ended.returncode != 0 and "DistributedSampler(drop_last=True)" in ended.stderr
