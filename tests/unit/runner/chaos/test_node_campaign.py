"""What a campaign over nodes checks, on made-up journals."""

from __future__ import annotations

import pytest
from helpers.journals import entries

from runner.chaos.node_campaign import acknowledged_is_there, one_writer, without_dropout
from runner.config.schema import Config


@pytest.mark.parametrize(
    ("acknowledged", "committed", "violations"),
    [(-1, [], 0), (20, [10, 20], 0), (20, [10, 30], 0), (20, [10], 1), (20, [], 1)],
)
def test_what_was_acknowledged_is_in_storage(acknowledged: int, committed: list[int], violations: int) -> None:
    assert len(acknowledged_is_there(acknowledged, committed)) == violations


def test_an_attempt_has_the_checkpoints_of_one_node() -> None:
    def committed(attempt: int, step: int, **more: object) -> dict[str, object]:
        return {"time": 1.0, "event": "committed", "attempt": attempt, "step": step, "tier": "local", **more}

    first, second = entries([committed(1, 10), committed(2, 20)]), entries([committed(3, 30)])
    assert one_writer({0: first, 2: second}) == []
    both = [*second, *entries([committed(2, 25)])]
    assert one_writer({0: first, 2: both}) == ["nodes [0, 2] have both committed in attempt 2"]
    own = entries([committed(2, 25, snapshot_attempt=2)])
    assert one_writer({0: first, 2: own}) == ["nodes [0, 2] have both committed in attempt 2"]


def test_a_replaced_leader_may_commit_what_the_new_one_holds_too() -> None:
    """As when its runner stood still for 19 s: its agent and the new leader's held the same snapshot."""

    def committed(attempt: int, step: int, snapshot_attempt: int) -> dict[str, object]:
        event = {"time": 1.0, "event": "committed", "attempt": attempt, "step": step, "tier": "local"}
        return {**event, "snapshot_attempt": snapshot_attempt}

    replaced = entries([committed(93, 760, 93), committed(94, 761, 93)])
    assert one_writer({1: replaced, 2: entries([committed(94, 780, 94)])}) == []


def test_a_job_has_no_dropout_and_stays_the_same_otherwise() -> None:
    job = Config.model_validate({"model": {"config": {"attention_dropout": 0.1, "hidden_size": 128}}})
    changed = without_dropout(job)
    assert changed.model.config == {"attention_dropout": 0.0, "hidden_size": 128} and changed.method.dropout == 0.0
    assert job.model.config["attention_dropout"] == 0.1
