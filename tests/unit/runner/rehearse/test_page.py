"""The page of a rehearsal says whether a job is safe, and if not what differs and what to do."""

from __future__ import annotations

import pytest

from runner.rehearse.disturbed_runs import Costs, Findings, Rehearsed
from runner.rehearse.page import advised_grace_s, advised_save_steps, render, to_json


def findings(*differences: str, **attributes: object) -> Findings:
    outcomes = [Rehearsed("undisturbed"), Rehearsed("again")]
    outcomes += [Rehearsed("killed in a step", difference=text, recovery_s=0.5) for text in differences]
    return Findings(outcomes, **attributes)  # type: ignore[arg-type]


def test_a_safe_job_is_called_safe() -> None:
    text = render(findings("", ""), "train.py", "2 ranks", 12)
    assert "SAFE: every run" in text and "NOT SAFE" not in text and "0.5 s  the same bits" in text


def test_what_is_in_no_checkpoint_is_named_also_where_it_made_no_difference() -> None:
    text = render(findings("", uncovered=["Mine.calls"]), "train.py", "2 ranks", 12)
    assert "Mine.calls" in text and "made no difference" in text


def test_an_unsafe_job_is_told_what_differs_and_what_helps() -> None:
    found = findings("step 9 differs: loss", uncovered=["Mine.calls"], hints=["a hint", "a hint"])
    text = render(found, "train.py", "2 ranks", 12)
    assert "NOT SAFE" in text and "step 9 differs: loss" in text and "states={...}" in text
    assert text.count("a hint") == 1
    assert not to_json(found, 12)["safe"]


def test_a_job_that_differs_by_itself_is_told_to_seed_everything() -> None:
    found = findings("step 3 differs: loss", by_itself="step 3 differs: loss")
    assert "two undisturbed runs differ, too" in render(found, "train.py", "2 ranks", 12)
    assert not to_json(found, 12)["deterministic"]


def test_a_moment_that_did_not_come_is_no_verdict() -> None:
    found = findings()
    found.outcomes.append(Rehearsed("killed while it evaluates", reached=False))
    assert "not reached: the job evaluates nothing" in render(found, "train.py", "2 ranks", 12)


@pytest.mark.parametrize(
    ("costs", "steps"),
    [
        (Costs(), None),
        (Costs(step_s=1.0, snapshot_s=0.0, commit_cpu_s=0.0), 1),
        (Costs(step_s=1.0, snapshot_s=0.05, commit_cpu_s=0.15), 20),
    ],
)
def test_saving_is_advised_at_a_hundredth_of_the_time(costs: Costs, steps: int | None) -> None:
    assert advised_save_steps(costs) == steps


def test_the_grace_is_three_times_what_was_measured_and_never_short() -> None:
    assert advised_grace_s(Costs(step_s=0.1)) == 15
    assert advised_grace_s(Costs(step_s=20.0, snapshot_s=1.0, commit_s=9.0)) == 90
