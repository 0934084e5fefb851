"""Digests of an order, and what is done where a replayed order differs."""

from __future__ import annotations

import pytest

from checkpointing.data.order import OrderDigest, check_order
from checkpointing.data.position import Position
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import ALLOW_CHANGES_ENV


def digest_of(*batches: object) -> OrderDigest:
    digest = OrderDigest()
    for number, batch in enumerate(batches):
        digest.add(number, batch)
    return digest


def test_the_digest_after_a_batch_is_known_while_the_loader_draws_ahead() -> None:
    ahead = digest_of([1, 2], [3, 4], [5, 6])
    assert ahead.after(2) == digest_of([1, 2], [3, 4]).newest
    # Training does not go back.
    assert ahead.after(1) is None
    ahead.reset()
    assert ahead.after(3) is None and ahead.newest == OrderDigest().newest


def test_indices_of_any_type_count() -> None:
    assert digest_of("a").newest != digest_of("b").newest
    assert digest_of([1, 2]).newest != digest_of([2, 1]).newest


def test_digests_do_not_pile_up_where_nothing_is_saved() -> None:
    digest = digest_of(*range(5000))
    assert digest.after(5000) == digest.newest
    assert len(digest._by_count) == 1


def test_another_order_is_refused_and_the_ranks_are_named_where_they_differ() -> None:
    recorded = Position(1, 4, order="a")
    check_order(recorded, "a", "Shuffled")
    check_order(Position(1, 4), "b", "Shuffled")
    with pytest.raises(CheckpointError, match=r"Shuffled gives other samples .* first 4 batches of epoch 1 differ"):
        check_order(recorded, "b", "Shuffled")
    with pytest.raises(CheckpointError, match=r"number of ranks, which was 2 and is 3"):
        check_order(recorded, "b", "Shuffled", (2, 3))


def test_another_order_is_accepted_where_the_user_allows_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ALLOW_CHANGES_ENV, "1")
    check_order(Position(1, 4, order="a"), "b", "Shuffled")
    assert "Shuffled gives other samples than before the change" in caplog.text
