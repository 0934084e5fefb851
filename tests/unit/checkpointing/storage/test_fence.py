"""Which checkpoints count, and who may publish."""

from __future__ import annotations

import pytest

from checkpointing.errors import Fenced
from checkpointing.storage.fence import MAX_ACCEPTED, Claim, Fence, parse_number


def test_what_was_there_when_an_attempt_began_counts_and_what_comes_later_does_not() -> None:
    fence = Fence(attempt=3, accepted=frozenset({(10, 1)}), writer="w", oldest=3)
    assert fence.admits_step(10, 1) and fence.lets_publish(10, 1)
    assert not fence.admits_step(20, 1) and not fence.admits_step(20, 2)
    assert fence.admits_step(20, 3) and fence.admits_step(20, 4)


def test_between_the_two_steps_what_counted_still_does_and_nothing_is_published() -> None:
    opened = Fence(attempt=3, oldest=1)
    assert opened.admits_step(20, 2)
    assert not opened.lets_publish(20, 2)


def test_fences_survive_the_way_and_those_of_older_versions_are_complete() -> None:
    fence = Fence(3, frozenset({(10, 1), (20, 2)}), "w", 2)
    assert Fence.from_json(fence.to_json()) == fence
    assert Fence.from_json(b'{"attempt": 3, "accepted": [], "writer": "w"}').oldest == 3


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"attempt": -1, "accepted": [], "writer": ""}', b"[" * 100_000])
def test_what_is_no_fence_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Fence.from_json(data)


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, "1", None])
def test_what_is_no_number_of_a_step_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a step or an attempt"):
        parse_number(value)


def test_an_attempt_is_claimed_in_two_steps() -> None:
    claim = Claim("/run")
    opened = claim.opened(Fence(1, frozenset({(10, 1)}), "other", 1), 2, [(15, 1)])
    assert (opened.attempt, opened.oldest, opened.writer) == (2, 1, claim.writer)
    assert opened.accepted == {(10, 1), (15, 1)}
    completed = claim.completed({(10, 1), (15, 1)})
    assert (completed.attempt, completed.oldest) == (2, 2) and completed.accepted == {(10, 1), (15, 1)}


def test_a_try_whose_answer_was_lost_is_our_own() -> None:
    claim = Claim("/run")
    opened = claim.opened(Fence(), 2, ())
    assert claim.opened(opened, 2, ()) is opened


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_another_process_has_begun_is_refused(attempt: int) -> None:
    with pytest.raises(Fenced, match="attempt 2 of this run has begun at /run"):
        Claim("/run").opened(Fence(2, writer="other"), attempt, ())


def test_only_the_newest_of_very_many_are_written_down() -> None:
    claim = Claim("/run")
    claim.opened(Fence(), 1, ())
    accepted = claim.completed({(step, 0) for step in range(2 * MAX_ACCEPTED)}).accepted
    assert min(accepted) == (MAX_ACCEPTED, 0) and len(accepted) == MAX_ACCEPTED


def test_a_checkpoint_is_checked_against_the_fence() -> None:
    claim = Claim("/run")
    fence = claim.opened(Fence(), 2, ())
    claim.check(fence, 10, 2)
    with pytest.raises(Fenced):
        claim.check(Fence(3), 10, 2)
    # Two processes began the same attempt, and the other one wrote last.
    with pytest.raises(Fenced):
        claim.check(Fence(2, writer="other"), 10, 2)
    # Another process publishes for this attempt, and knows nothing of its writer.
    Claim("/run").check(fence, 10, 2)


def test_a_location_that_was_emptied_is_not_written_to() -> None:
    claim = Claim("/run")
    claim.opened(Fence(), 2, ())
    with pytest.raises(OSError, match="was emptied, moved or replaced since attempt 2 began"):
        claim.check(Fence(), 10, 2)


@pytest.mark.parametrize(("begun", "attempt", "swept"), [(-1, 5, True), (3, 3, True), (3, 2, True), (3, 4, False)])
def test_what_a_newer_attempt_writes_is_not_swept(begun: int, attempt: int, swept: bool) -> None:
    claim = Claim("/run")
    claim.attempt = begun
    assert claim.outlives(attempt) is swept
