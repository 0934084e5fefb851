"""Which stage an event belongs to."""

from __future__ import annotations

from checkpointing.agent.events import Committed, TierUnreachable
from checkpointing.agent.reporting import Digested, stamped, stamped_announcement
from checkpointing.commit.tiers import FIRST_STAGE, TrainingStage

SECOND = TrainingStage("stage-2-dpo", 2, 20)


def test_an_event_of_a_later_stage_has_its_step_counted_over_all_stages() -> None:
    event = stamped(Committed(step=10), SECOND)
    assert (event.stage, event.step, event.run_step, event.step_of_run) == ("stage-2-dpo", 10, 30, 30)


def test_events_of_the_first_stage_are_left_as_they_are() -> None:
    event = Committed(step=10)
    assert stamped(event, FIRST_STAGE) is event
    assert stamped_announcement(event.to_dict(), FIRST_STAGE) == event.to_dict()


def test_what_concerns_no_step_has_no_stage() -> None:
    event, notice = TierUnreachable(tier="remote", reason="no answer"), Digested()
    assert stamped(event, SECOND) is event
    assert stamped(notice, SECOND) is notice


def test_what_a_rank_announces_is_stamped_whatever_it_is() -> None:
    assert stamped_announcement({"event": "anything", "step": 3, "x": 1}, SECOND) == {
        "event": "anything",
        "step": 3,
        "x": 1,
        "stage": "stage-2-dpo",
        "run_step": 23,
    }
    assert stamped_announcement({"event": "anything"}, SECOND) == {"event": "anything", "stage": "stage-2-dpo"}
