"""Loops whose ranks do not do the same at every step: resumed exactly, or refused by what to do instead."""

from __future__ import annotations

from pathlib import Path

from infra.torchrun import torchrun
from integration.support import Run

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


def test_ranks_that_a_script_has_spawned_train_and_resume(tmp_path: Path) -> None:
    """Each took itself for the first one of its machine, and waited for the other's share for ever."""
    for start in (0, 4):
        ended = torchrun(PROGRAM, "spawn", tmp_path, ranks=1, alone=True, timeout_s=100)
        assert ended.returncode == 0, ended.stderr
        assert sorted(ended.stdout.splitlines()) == [f"0 of 2 from {start}", f"1 of 2 from {start}"]


def test_ranks_that_a_script_has_spawned_are_refused_under_the_runner(tmp_path: Path) -> None:
    """They waited half an hour for the launcher's store."""
    run = Run(
        tmp_path / "run", "--nproc-per-node", "1", script=[str(PROGRAM), "spawn", str(tmp_path / "checkpoints")]
    ).start()
    assert run.finish() == 78
    assert "has made 2 ranks itself" in run.output and "--nproc-per-node 2" in run.output


def test_what_each_of_three_ranks_has_saved_is_refused_on_two_or_divided_as_it_says(tmp_path: Path) -> None:
    assert torchrun(PROGRAM, "own_states", tmp_path, ranks=3).returncode == 0
    refused = torchrun(PROGRAM, "own_states", tmp_path, ranks=2)
    assert refused.returncode != 0 and "holds 'seen' of `states` for each of 3 ranks" in refused.stderr
    divided = torchrun(PROGRAM, "own_states", tmp_path, 1, ranks=2)
    assert divided.returncode == 0, divided.stderr
    assert sorted(divided.stdout.splitlines()) == [
        "0 2 ['3.0.1', '3.1.1', '3.2.1']",
        "1 2 ['3.0.2', '3.1.2', '3.2.2']",
    ]
