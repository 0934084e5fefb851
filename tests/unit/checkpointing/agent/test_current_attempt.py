"""The attempt that runs now: what its begin, its stages and its end do to snapshots and to the shared page."""

from __future__ import annotations

import pytest
from unit.checkpointing.agent.doubles import Bench, save

from checkpointing.agent.arenas import ArenaState
from checkpointing.agent.current_attempt import CurrentAttempt
from checkpointing.agent.events import SnapshotDropped, StageEntered
from checkpointing.commit.tiers import FIRST_STAGE, TrainingStage
from checkpointing.host.heartbeat import CommitReport, ControlPage, Heartbeat, Phase

SECOND = TrainingStage("stage-2-dpo", 2, 20)


class Agent(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.control = ControlPage.create(2)
        self.attempt = CurrentAttempt(self.workers, self.scheduler, self.resumption, self.control, self.events.append)


@pytest.fixture
def agent() -> Agent:
    return Agent()


def test_an_attempt_begins_with_a_blank_page(agent: Agent) -> None:
    agent.control.stop_requested = True
    agent.control.write(1, Heartbeat(Phase.TRAINING, 7, 1.0, 0, 1.0, 0.1, 3))
    agent.control.last_commit = CommitReport(7, 1.0, 0.5)
    agent.attempt.begin(1, fetch=False)
    assert not agent.control.stop_requested
    assert agent.control.read(1).phase is Phase.STARTING and agent.control.read(1).beats == 0
    # What a commit costs is as true as before.
    assert agent.control.last_commit.step == 7


def test_the_same_or_an_older_attempt_begins_nothing(agent: Agent) -> None:
    agent.attempt.begin(3, fetch=False)
    agent.settle()
    arena = agent.got(5)
    agent.control.stop_requested = True
    for number in (3, 2):
        agent.attempt.begin(number, fetch=False)
    assert agent.attempt.number == 3 and agent.control.stop_requested and arena.state is ArenaState.FILLING


def test_a_newer_attempt_drops_unfinished_snapshots_and_fences_the_older_one(agent: Agent) -> None:
    agent.attempt.begin(1, fetch=False)
    whole, unfinished = agent.snapshot(4), agent.got(5)
    agent.attempt.begin(2, fetch=False)
    assert (whole.state, unfinished.state) == (ArenaState.WHOLE, ArenaState.FREE)
    assert agent.events[1:] == [SnapshotDropped(step=5, reason="a rank ended in mid-copy")]
    agent.settle()
    assert agent.tiers.durable.has_begun(2) and agent.tiers.durable.fence().attempt == 2
    # The snapshot of the attempt before may still be committed.
    agent.attempt.end()
    agent.settle()
    assert agent.tiers.catalog.committed_steps() == [4]


def test_a_newer_attempt_starts_at_the_first_stage(agent: Agent) -> None:
    agent.attempt.begin(1, fetch=False)
    agent.attempt.enter(SECOND, fetch=False)
    assert agent.workers.stage == SECOND
    agent.attempt.begin(2, fetch=False)
    assert agent.workers.stage == FIRST_STAGE


def test_a_stage_is_announced_and_kept_with_the_run(agent: Agent) -> None:
    agent.attempt.begin(1, fetch=False)
    agent.control.last_commit = CommitReport(20, 1.0, 0.5)
    agent.attempt.enter(SECOND, fetch=False)
    agent.settle()
    assert agent.events == [StageEntered(stage="stage-2-dpo", number=2, steps_before=20)]
    agent.workers.of_run.run_pending()
    kept = agent.tiers.durable.sidecars.read("stage-2-dpo.json")
    assert kept is not None and TrainingStage.from_json(kept) == SECOND
    # Step 20 of the stage before says nothing about this stage's steps.
    assert agent.control.last_commit == CommitReport()


def test_the_stage_that_trains_is_not_entered_again(agent: Agent) -> None:
    agent.attempt.begin(1, fetch=False)
    for _ in range(2):
        agent.attempt.enter(SECOND, fetch=False)
    arena = agent.got(3)
    agent.attempt.enter(SECOND, fetch=False)
    assert len(agent.events) == 1 and arena.state is ArenaState.FILLING


def test_a_stage_whose_name_is_refused_changes_nothing(agent: Agent) -> None:
    agent.attempt.begin(1, fetch=False)
    arena = agent.got(3)
    with pytest.raises(ValueError, match="is not the name of a stage"):
        agent.attempt.enter(TrainingStage("../other", 2, 0), fetch=False)
    assert agent.workers.stage == FIRST_STAGE and arena.state is ArenaState.FILLING and agent.events == []


@pytest.mark.parametrize("fetch", [True, False])
def test_the_newest_checkpoint_is_read_ahead_where_the_attempt_resumes_from_it(agent: Agent, fetch: bool) -> None:
    save(agent.tiers.durable, 5)
    agent.attempt.begin(1, fetch=fetch)
    agent.settle()
    agent.resumption.fetch_newest()
    assert (agent.resumption.fetching is not None) is fetch


def test_the_end_commits_the_newest_snapshot_and_drops_the_unfinished_one(agent: Agent) -> None:
    agent.attempt.begin(1, fetch=False)
    agent.settle()
    agent.snapshot(4)
    agent.got(5)
    agent.attempt.end()
    agent.settle()
    assert agent.tiers.catalog.committed_steps() == [4]
    assert SnapshotDropped(step=5, reason="a rank ended in mid-copy") in agent.events
