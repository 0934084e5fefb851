from __future__ import annotations

import pytest

from checkpointing.commit.retention import Retention, steps_to_remove, steps_to_upload
from checkpointing.format.manifest import Manifest


def manifest(step: int, loss: float | None = None) -> Manifest:
    return Manifest("run", 1, step, 1, 0, 0.0, (), metrics={} if loss is None else {"eval_loss": loss})


@pytest.mark.parametrize(
    ("steps", "keep", "removed"),
    [
        ([], 3, []),
        ([10], 0, []),
        ([10, 20], 1, [10]),
        ([30, 10, 20, 40], 2, [10, 20]),
        ([10, 20], None, []),
        ([10, 20], 5, []),
    ],
)
def test_the_newest_stay(steps: list[int], keep: int | None, removed: list[int]) -> None:
    assert steps_to_remove(map(manifest, steps), Retention(keep)) == removed


def test_multiples_and_the_best_stay() -> None:
    saved = [manifest(step, loss) for step, loss in [(10, 3.0), (20, None), (30, 1.0), (40, 2.0), (50, None)]]
    assert steps_to_remove(saved, Retention(1, keep_every=20)) == [10, 30]
    assert steps_to_remove(saved, Retention(1, best_metric="eval_loss")) == [10, 20, 40]
    assert steps_to_remove(saved, Retention(1, best_metric="eval_loss", greater_is_better=True)) == [20, 30, 40]
    assert steps_to_remove(saved, Retention(1, best_metric="never_measured")) == [10, 20, 30, 40]


def test_several_best_ones_stay() -> None:
    saved = [manifest(step, loss) for step, loss in [(10, 3.0), (20, None), (30, 1.0), (40, 2.0), (50, None)]]
    assert steps_to_remove(saved, Retention(1, keep_best=2, best_metric="eval_loss")) == [10, 20]
    assert steps_to_remove(saved, Retention(1, keep_best=9, best_metric="eval_loss")) == [20]
    assert steps_to_remove(saved, Retention(1, keep_best=2)) == [10, 20, 30, 40]


def test_what_a_user_keeps_stays_and_is_asked_for_only_if_needed() -> None:
    saved = [manifest(step) for step in (10, 20, 30)]
    assert steps_to_remove(saved, Retention(1), lambda: [10, 99]) == [20]

    def fail() -> list[int]:
        raise AssertionError

    assert steps_to_remove(saved, Retention(3), fail) == []
    assert steps_to_upload(saved, [manifest(30)], Retention(1), [10, 99]) == [10]


def test_of_equals_the_oldest_is_the_best() -> None:
    """As the Trainer counts: a new best one is better than those before it."""
    saved = [manifest(10, 1.0), manifest(20, 1.0), manifest(30)]
    assert steps_to_remove(saved, Retention(1, best_metric="eval_loss")) == [20]


@pytest.mark.parametrize(
    ("local", "durable", "due"),
    [
        ([], [], []),
        ([], [10], []),
        ([10, 30], [], [30]),  # what lies between is passed over
        ([10, 30], [30], []),
        ([10, 30], [50], []),  # another machine went on
        ([20, 30, 40, 50], [30], [50, 40, 20]),  # multiples are caught up on, the newest goes first
        ([20, 40], [20], [40]),
    ],
)
def test_what_is_uploaded(local: list[int], durable: list[int], due: list[int]) -> None:
    assert steps_to_upload(map(manifest, local), map(manifest, durable), Retention(2, keep_every=20)) == due


def test_the_best_is_uploaded_though_newer_ones_are_there() -> None:
    local, durable = [manifest(10, 1.0), manifest(20, 2.0)], [manifest(20, 2.0)]
    assert steps_to_upload(local, durable, Retention(1, best_metric="eval_loss")) == [10]
    better = [manifest(5, 0.5), manifest(20, 2.0)]
    assert steps_to_upload(local, better, Retention(1, best_metric="eval_loss")) == []


def test_a_senseless_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_every=0"):
        Retention(keep_every=0)
    with pytest.raises(ValueError, match="keep_best=0"):
        Retention(keep_best=0)
