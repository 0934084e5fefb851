"""What a resumed run says of the steps that it recomputes, on all its ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.thread_ranks import run_ranks

from checkpointing.agent.events import StepsRepeated
from checkpointing.errors import RepetitionDiffers
from checkpointing.format.step_record import StepRecord
from checkpointing.process.ranks import Ranks
from checkpointing.proof.repetition import ResumeProof


def record(step: int, values: dict[str, int] | None = None, *, differed: tuple[str, ...] = ()) -> StepRecord:
    return StepRecord(
        step, {"batch": step, "torch": step, "loss": step, "parameters": step} | (values or {}), differed=differed
    )


def earlier(first: int, last: int) -> dict[int, StepRecord]:
    return {step: record(step) for step in range(first, last + 1)}


class Rank:
    """One rank's resume."""

    def __init__(self, ranks: Ranks, before: dict[int, StepRecord], verify: Any = "auto", start: int = 100) -> None:
        self.reports: list[StepsRepeated] = []
        self.proof = ResumeProof(ranks, verify, self.reports.append, lambda step: ["Mine.calls"])
        self.proof.begin(start, before)
        self.ended = start

    def step(self, **values: int) -> tuple[str, ...]:
        self.ended += 1
        found = self.proof.differs(record(self.ended, values))
        self.proof.end_of_step(self.ended, lambda: None, agreed=False)
        return found


def test_steps_that_are_equal_are_reported_once_all_are_repeated() -> None:
    rank = Rank(Ranks(), earlier(90, 113))
    for _ in range(20):
        assert not rank.step()
    [report] = rank.reports
    assert (report.first, report.last, report.differs) == (101, 113, [])
    assert report.describe() == "resumed from step 100; steps 101\u2013113 repeated bit for bit"


def test_a_single_step_is_called_one() -> None:
    rank = Rank(Ranks(), earlier(101, 101))
    rank.step()
    rank.step()
    assert rank.reports[0].describe() == "resumed from step 100; step 101 repeated bit for bit"


def test_where_no_step_is_repeated_nothing_is_said() -> None:
    rank = Rank(Ranks(), earlier(1, 100))
    rank.step()
    rank.proof.close(lambda: None)
    assert rank.reports == []


def test_at_the_beginning_generators_that_nothing_uses_need_no_seed() -> None:
    rank = Rank(Ranks(), earlier(1, 3), start=0)
    assert not any(rank.step(torch=7) for _ in range(4))
    assert rank.reports[0].differs == []
    used = Rank(Ranks(), earlier(1, 3), start=0)
    assert used.step(torch=7, loss=0) == ("torch", "loss")


def test_training_that_ends_first_reports_what_it_has_compared() -> None:
    rank = Rank(Ranks(), earlier(101, 113))
    rank.step()
    rank.step()
    rank.proof.close(lambda: None)
    assert [(one.first, one.last) for one in rank.reports] == [(101, 102)]


def test_a_difference_names_its_step_and_cause_and_what_may_be_missing() -> None:
    rank = Rank(Ranks(), earlier(101, 113))
    rank.step()
    assert rank.step(loss=0, parameters=0)
    rank.proof.end_of_step(rank.ended, lambda: None, agreed=True)
    [report] = rank.reports
    assert (report.last, report.differs, report.rank) == (101, ["loss", "parameters"], 0)
    text = report.describe()
    assert "step 102 differs (rank 0): the loss" in text and "Mine.calls" in text and "docs/" in text


def test_after_a_difference_all_later_steps_differ_and_none_is_reported() -> None:
    rank = Rank(Ranks(), earlier(101, 105))
    assert [rank.step(batch=0) for _ in range(9)] == [("batch",), *[()] * 8]
    assert len(rank.reports) == 1


def test_generators_that_were_not_restored_are_the_cause_of_another_batch() -> None:
    rank = Rank(Ranks(), earlier(100, 105))
    rank.proof.look_at_start(lambda: {"torch": 1, "numpy": 2})
    rank.step(batch=0, torch=0)
    rank.proof.close(lambda: None)
    assert rank.reports[0].differs == ["torch", "batch"]


def test_another_batch_may_draw_other_numbers() -> None:
    rank = Rank(Ranks(), earlier(100, 105))
    rank.proof.look_at_start(lambda: {"torch": 100})
    rank.step(batch=0, torch=0)
    rank.proof.close(lambda: None)
    assert rank.reports[0].differs == ["batch", "torch"]


def test_a_step_that_differs_each_time_from_equal_input_differs_by_itself() -> None:
    before = earlier(101, 105) | {102: record(102, differed=("loss",))}
    rank = Rank(Ranks(), before, "strict")
    rank.step()
    rank.step(loss=0)
    [report] = rank.reports
    assert report.by_itself and "not deterministic by itself" in report.describe()


def test_strict_takes_a_difference_that_comes_again_for_one() -> None:
    """The second repetition is equal to the first one, and both differ from the first computation."""
    before = earlier(101, 105) | {102: record(102, differed=("loss",))}
    rank = Rank(Ranks(), before, "strict")
    rank.step()
    with pytest.raises(RepetitionDiffers, match="step 102 differs"):
        rank.step()
    assert not rank.reports[0].by_itself
    relaxed = Rank(Ranks(), before)
    assert not any(relaxed.step() for _ in range(5))


@pytest.mark.parametrize("value", ["batch", "torch"])
def test_other_input_is_never_called_by_itself(value: str) -> None:
    rank = Rank(Ranks(), {101: record(101, differed=("loss",))})
    rank.step(loss=0, **{value: 0})
    rank.proof.close(lambda: None)
    assert not rank.reports[0].by_itself


def test_strict_ends_at_the_step_that_differs() -> None:
    rank = Rank(Ranks(), earlier(101, 105), "strict")
    rank.step()
    with pytest.raises(RepetitionDiffers, match="step 102 differs"):
        rank.step(parameters=0)
    assert len(rank.reports) == 1


@pytest.mark.parametrize("verify", ["auto", "strict"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_difference_on_one_rank_is_known_to_all(size: int, verify: str) -> None:
    def run(ranks: Ranks) -> list[StepsRepeated]:
        rank = Rank(ranks, earlier(101, 104), verify)
        try:
            rank.step()
            rank.step(**({"batch": 0} if ranks.rank == size - 1 else {}))
            rank.proof.end_of_step(rank.ended, lambda: None, agreed=True)
        except RepetitionDiffers:
            assert verify == "strict"
        return rank.reports

    for reports in run_ranks(run, size):
        assert isinstance(reports, list)
        [report] = reports
        assert (report.last, report.differs, report.rank) == (101, ["batch"], size - 1)


def test_ranks_without_a_record_wait_for_those_that_have_one() -> None:
    """A node that has joined has recorded nothing."""

    def run(ranks: Ranks) -> list[StepsRepeated]:
        rank = Rank(ranks, earlier(101, 103) if ranks.rank == 0 else {})
        for _ in range(4):
            rank.step()
        return rank.reports

    for reports in run_ranks(run):
        assert isinstance(reports, list)
        assert [(one.first, one.last, one.differs) for one in reports] == [(101, 103, [])]
