"""One storage worker for each stage of a run."""

from __future__ import annotations

import pytest
from unit.checkpointing.agent.doubles import Reports, UnthreadedWorker

from checkpointing.agent.events import Committed
from checkpointing.agent.reporting import Digested, Report
from checkpointing.agent.writers import Writers
from checkpointing.commit.tiers import FIRST_STAGE, Tiers, TrainingStage
from checkpointing.storage import open_storage

SECOND = TrainingStage("stage-2-dpo", 2, 20)


class Desk:
    def __init__(self) -> None:
        self.reports, self.made = Reports(), list[tuple[Tiers, Report]]()
        self.workers = Writers(Tiers(open_storage("memory://here/run")), self.reports, self.make, commits=True)

    def make(self, tiers: Tiers, report: Report, commits: bool) -> UnthreadedWorker:
        self.made.append((tiers, report))
        return UnthreadedWorker(tiers, report, commits)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_stage_keeps_its_checkpoints_in_a_folder_of_its_own(desk: Desk) -> None:
    desk.workers.enter(SECOND)
    assert [tiers.durable.location for tiers, _ in desk.made] == ["memory://here/run", "memory://here/run/stage-2-dpo"]
    assert desk.workers.current is desk.workers.of("stage-2-dpo") is not desk.workers.of_run


def test_a_stage_that_is_entered_again_has_its_worker(desk: Desk) -> None:
    desk.workers.enter(SECOND)
    desk.workers.restart()
    assert desk.workers.stage == FIRST_STAGE and desk.workers.current is desk.workers.of_run
    desk.workers.enter(SECOND)
    assert len(desk.made) == 2


def test_all_stages_learn_that_another_node_writes_now(desk: Desk) -> None:
    desk.workers.commits = False
    desk.workers.enter(SECOND)
    assert not desk.workers.of_run.fencer.commits and not desk.workers.current.fencer.commits
    desk.workers.commits = True
    assert desk.workers.of_run.fencer.commits and desk.workers.current.fencer.commits


def test_results_of_a_later_stage_are_stamped(desk: Desk) -> None:
    desk.workers.enter(SECOND)
    for _, report in desk.made:
        report(Committed(step=5), None)
        report(Digested(), None)
    assert desk.reports.results == [
        Committed(step=5),
        Digested(),
        Committed(step=5, stage="stage-2-dpo", run_step=25),
        Digested(),
    ]


@pytest.mark.parametrize("name", ["", "stage-1", "../stage-2"])
def test_a_name_that_is_none_is_refused(name: str, desk: Desk) -> None:
    with pytest.raises(ValueError, match="is not the name of a stage"):
        desk.workers.check(TrainingStage(name, 2, 0))
