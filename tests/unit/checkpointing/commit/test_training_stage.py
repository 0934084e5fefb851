"""Which training of a process is which stage."""

from __future__ import annotations

import pytest

from checkpointing.commit.tiers import FIRST_STAGE, STAGE_NAME, TrainingStage, TrainingStages


def test_under_a_supervisor_each_location_is_a_stage_in_the_order_of_use() -> None:
    def lives(stages: TrainingStages, ends: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
        found = []
        for location, step in ends:
            stage = stages.enter(location, supervised=True)
            found.append((stage.name, stage.number, stage.steps_before))
            stages.leave(location, step, finished=True)
        return found

    ends = [("runs/sft", 60), ("runs/dpo/", 40), ("/x/ reward model", 10)]
    expected = [("", 1, 0), ("stage-2-dpo", 2, 60), ("stage-3-reward-model", 3, 100)]
    # A script that is started again makes them in the same order.
    assert lives(TrainingStages(), ends) == lives(TrainingStages(), ends) == expected
    assert all(STAGE_NAME.fullmatch(name) for name, _, _ in expected[1:])


def test_the_same_location_is_another_stage_once_its_training_has_finished() -> None:
    stages = TrainingStages()
    assert stages.enter("out", supervised=False) == FIRST_STAGE
    stages.leave("out", 30, finished=False)  # interrupted: a notebook's cell that is run again
    assert stages.enter("out", supervised=False) == FIRST_STAGE
    stages.leave("out", 60, finished=True)
    again = stages.enter("out", supervised=False)
    assert (again.name, again.inside("out"), again.inside("s3://b/p/")) == (
        "stage-2",
        "out/stage-2",
        "s3://b/p/stage-2",
    )
    # Without a supervisor another location is on its own.
    assert (
        stages.enter("other", supervised=False) == TrainingStage("", 1, 0)
        or stages.enter("other", supervised=False).name == ""
    )


@pytest.mark.parametrize("name", ["stage-1", "stage-02", "../stage-2", "stage-2-a/b", "stage-2-", "checkpoint-2"])
def test_what_is_no_stage_is_not_taken_for_one(name: str) -> None:
    assert STAGE_NAME.fullmatch(name) is None


def test_a_stage_survives_the_way() -> None:
    stage = TrainingStage("stage-2-dpo", 2, 60)
    assert TrainingStage.from_json(stage.to_json()) == stage


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"name": "stage-2", "number": 2}',
        b'{"name": "../x", "number": 2, "steps_before": 0}',
        b'{"name": "stage-2", "number": true, "steps_before": 0}',
        b'{"name": "stage-2", "number": 2, "steps_before": -1}',
    ],
)
def test_what_describes_no_stage_is_passed_over(data: bytes) -> None:
    assert TrainingStage.from_json(data) is None
