"""What must hold whatever was done to a run: each check sees what is wrong, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import journals

from checkpointing.commit.tiers import open_tiers
from runner.chaos import invariants
from runner.journal.events import Entry, parse


def journal(*entries: tuple[str, dict[str, Any]]) -> list[Entry]:
    """Entries a second apart."""
    lines = [
        {"time": 100.0 + number, "event": name, "attempt": 1, **rest} for number, (name, rest) in enumerate(entries)
    ]
    parsed = [entry for line in lines if (entry := parse(line)) is not None]
    assert [entry.event.name for entry in parsed] == [name for name, _ in entries]
    return parsed


BEGUN = ("training_started", {"step": 0, "total_steps": 50})
COMMITTED = ("committed", {"step": 20})


def again(step: int, told: int | None) -> list[tuple[str, dict[str, Any]]]:
    """The second attempt begins."""
    resumed = [("resumed", {"step": told, "attempt": 2, "source": "memory"})] if told is not None else []
    return [*resumed, ("training_started", {"step": step, "attempt": 2})]


@pytest.mark.parametrize("step", [20, 27])
def test_going_on_from_what_was_acknowledged_or_later_is_well(step: int) -> None:
    for entries in (again(step, step), reversed(again(step, step))):  # told by two ways, each in its own time
        assert invariants.nothing_acknowledged_is_lost(journal(BEGUN, COMMITTED, *entries), []) == []


@pytest.mark.parametrize(("step", "told"), [(0, None), (10, 10)])
def test_going_on_from_before_what_was_acknowledged_is_a_loss(step: int, told: int | None) -> None:
    events = journal(BEGUN, COMMITTED, *again(step, told))
    assert invariants.nothing_acknowledged_is_lost(events, []) == [
        f"attempt 2 began at step {step}; step 20 had been committed"
    ]
    assert invariants.nothing_acknowledged_is_lost(events, [(2, 20)]) == [], "the campaign itself had damaged it"
    assert invariants.nothing_acknowledged_is_lost(events, [(len(events), 20)]), "but not yet"


def test_what_the_journal_says_of_the_resume_is_so() -> None:
    events = journal(BEGUN, COMMITTED, *again(25, 20))
    assert invariants.nothing_acknowledged_is_lost(events, []) == [
        "attempt 2 began at step 25; the journal says resumed at 20"
    ]


def test_restarts_and_sessions_are_counted() -> None:
    backoff = ("backoff", {"delay_s": 1.0})
    events = journal(("run_started", {}), backoff, ("run_started", {}), backoff)
    assert invariants.restarts_match(events, 1, 2, 2) == []
    assert invariants.restarts_match(events, 3, 3, 2) == ["the journal has 2 restarts, the faults account for 3"]
    assert invariants.restarts_match(events, 0, 1, 2)
    assert invariants.restarts_match(events, 2, 2, 1) == ["the journal has 2 sessions of the runner, there were 1"]


def test_leftovers_are_named(tmp_path: Path) -> None:
    temporary, location = tmp_path / "tmp", tmp_path / "checkpoints"
    temporary.mkdir()
    location.mkdir()
    tiers, semaphore = open_tiers(str(location)), tmp_path / "sem.mp-1"
    assert invariants.nothing_is_left(tiers, temporary, {semaphore}) == []
    (temporary / "runner-abc").mkdir()
    (location / ".checkpoint-20.1.tmp").mkdir()
    semaphore.touch()
    assert invariants.nothing_is_left(tiers, temporary, {semaphore}) == [
        f"{location}: .checkpoint-20.1.tmp is left over",
        f"{temporary / 'runner-abc'} is left over",
        f"{semaphore} is left over",
    ]


def test_a_checkpoint_that_is_not_whole_is_seen(tmp_path: Path) -> None:
    tiers = open_tiers(str(tmp_path))
    assert invariants.newest_is_intact(tiers, set()) == []
    transaction = tiers.durable.begin(3, 1)
    transaction.abort()
    assert invariants.newest_is_intact(tiers, set()) == []


@pytest.mark.parametrize(
    ("code", "told", "wrong"),
    [(0, 0, False), (75, 75, False), (0, 75, True), (76, None, True), (-9, None, False)],
)
def test_a_runner_ends_with_the_code_of_its_journal(code: int, told: int | None, wrong: bool) -> None:
    before: list[tuple[str, dict[str, Any]]] = [
        ("run_started", {"pid": 6}),
        ("run_ended", {"exit_code": 75, "state": "preempted"}),
    ]
    ended = [("run_ended", {"exit_code": told, "state": "failed"})] if told is not None else []
    events = journal(*before, ("run_started", {"pid": 7}), *ended)
    assert bool(invariants.exit_code_matches_journal(events, 7, code)) is wrong
    # It was stopped before it had begun to tell.
    assert invariants.exit_code_matches_journal(events, 8, code) == []


@pytest.mark.parametrize(
    ("acknowledged", "committed", "violations"),
    [(-1, [], 0), (20, [10, 20], 0), (20, [10, 30], 0), (20, [10], 1), (20, [], 1)],
)
def test_what_was_acknowledged_is_in_storage(acknowledged: int, committed: list[int], violations: int) -> None:
    assert len(invariants.acknowledged_is_there(acknowledged, committed)) == violations


def test_an_attempt_has_the_checkpoints_of_one_node() -> None:
    def committed(attempt: int, step: int, **more: object) -> dict[str, object]:
        return {"time": 1.0, "event": "committed", "attempt": attempt, "step": step, "tier": "local", **more}

    first, second = journals.entries([committed(1, 10), committed(2, 20)]), journals.entries([committed(3, 30)])
    assert invariants.one_writer({0: first, 2: second}) == []
    both = [*second, *journals.entries([committed(2, 25)])]
    assert invariants.one_writer({0: first, 2: both}) == ["nodes [0, 2] have both committed in attempt 2"]
    own = journals.entries([committed(2, 25, snapshot_attempt=2)])
    assert invariants.one_writer({0: first, 2: own}) == ["nodes [0, 2] have both committed in attempt 2"]


def test_a_replaced_leader_may_commit_what_the_new_one_holds_too() -> None:
    """As when its runner stood still for 19 s: its agent and the new leader's held the same snapshot."""

    def committed(attempt: int, step: int, snapshot_attempt: int) -> dict[str, object]:
        event = {"time": 1.0, "event": "committed", "attempt": attempt, "step": step, "tier": "local"}
        return {**event, "snapshot_attempt": snapshot_attempt}

    replaced = journals.entries([committed(93, 760, 93), committed(94, 761, 93)])
    assert invariants.one_writer({1: replaced, 2: journals.entries([committed(94, 780, 94)])}) == []
