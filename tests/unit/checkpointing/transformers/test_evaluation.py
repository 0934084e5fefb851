"""An evaluation is cut short only where a resumed run can repeat it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from checkpointing.transformers.callback import EvaluationCutShort, InterruptibleEvaluation


class Manager:
    def __init__(self, stops: bool) -> None:
        self.stops, self.num_pauses, self.num_questions = stops, 0, 0

    def pause(self) -> None:
        self.num_pauses += 1

    def agree_to_stop(self) -> bool:
        self.num_questions += 1
        return self.stops


def test_an_evaluation_is_cut_short_once_all_ranks_agree() -> None:
    manager: Any = Manager(stops=False)
    evaluation = InterruptibleEvaluation(manager, 1)
    random.seed(1)
    before = random.getstate()
    evaluation.begin(can_be_repeated=True)
    random.random()
    evaluation.step()
    manager.stops = True
    with pytest.raises(EvaluationCutShort):
        evaluation.step()
    assert evaluation.before is not None and evaluation.before["python"] == before
    assert (manager.num_pauses, manager.num_questions) == (3, 2)
    evaluation.end()
    evaluation.step()
    assert evaluation.before is None and manager.num_questions == 2


def test_an_evaluation_that_could_not_be_repeated_runs_to_its_end() -> None:
    manager: Any = Manager(stops=True)
    evaluation = InterruptibleEvaluation(manager, 1)
    evaluation.begin(can_be_repeated=False)
    evaluation.step()
    assert (manager.num_pauses, manager.num_questions) == (2, 0)


def test_generators_are_kept_for_the_first_batch_after_a_repeated_evaluation() -> None:
    manager: Any = Manager(stops=False)
    evaluation = InterruptibleEvaluation(manager, 1)
    evaluation.was_repeated()
    assert evaluation.after is not None and evaluation.after["python"] == random.getstate()
