"""States of `ExportableState` callbacks, exported and restored in place."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerControl
from transformers.trainer_callback import ExportableState, TrainerCallback

from checkpointing.transformers.further_states import export_states, restore_states, stops_epoch


class Counter(TrainerCallback, ExportableState):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_several_callbacks_of_one_class_keep_their_own_states() -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    stopping.early_stopping_patience_counter = 2
    control = TrainerControl(should_save=True)
    saved = export_states([Counter(1), stopping, Counter(2), TrainerCallback(), control])
    assert saved.keys() == {"Counter", "EarlyStoppingCallback", "TrainerControl"}
    again, counters, other_control = EarlyStoppingCallback(3), [Counter(), Counter()], TrainerControl()
    restore_states([*counters, again, other_control, TrainerCallback()], saved)
    assert again.early_stopping_patience_counter == 2
    assert [counter.count for counter in counters] == [1, 2]
    # It belongs to the loop.
    assert not other_control.should_save


def test_callbacks_that_came_or_went_are_passed_over() -> None:
    counters = [Counter(), Counter(9)]
    restore_states(counters, {"Counter": {"attributes": {"count": 5}}, "Gone": {"attributes": {"x": 1}}})
    assert [counter.count for counter in counters] == [5, 9]


def test_something_else_is_an_error() -> None:
    with pytest.raises(AttributeError):
        restore_states([Counter()], {"Counter": 3})


@pytest.mark.parametrize("stops", [True, False])
def test_whether_the_epoch_was_to_end_is_known(stops: bool) -> None:
    assert stops_epoch(export_states([TrainerControl(should_epoch_stop=stops)])) is stops
    assert not stops_epoch({})
