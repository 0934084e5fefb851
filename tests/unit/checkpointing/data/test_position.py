"""What is recorded of the data: positions, digests of an order, and that of a data set."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from checkpointing.data.dealing import StepLayout
from checkpointing.data.position import EpochStart, OrderDigest, Position, check_order, data_digest, num_rows
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import ALLOW_CHANGES_ENV
from checkpointing.process import rng

POSITION = Position(
    epoch=2,
    consumed=7,
    order="0f",
    start=EpochStart(rng.host_state(), {"0.generator": torch.Generator().get_state()}, {"order.calls": 3}),
    generators={"0.generator": torch.Generator().get_state()},
    counters={"order.calls": 4},
    layout=StepLayout(2, 4, 1),
    seed=9,
    stream=rng.host_state(),
)


def test_a_position_survives_a_file_that_is_read_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(POSITION.to_state(), file)
    found = Position.from_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert repr(found.to_state()) == repr(POSITION.to_state())
    assert found.start is not None
    rng.set_host_state(dict(found.start.host))


def test_a_position_before_the_first_epoch_has_no_start() -> None:
    assert Position.from_state(Position(0, 0, seed=1).to_state()).start is None


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"epoch": 1.0},
        {"consumed": True},
        {"consumed": "7"},
        {"start": [1]},
        {"start": {"host": {}, "owned": 1, "counters": {}}},
        {"owned_now": None},
        {"counters_now": [1]},
        {"layout": [1, 2]},
        {"layout": [1, 2, 0]},
        {"seed": None},
        {"seed": "x"},
    ],
)
def test_a_value_that_is_not_possible_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Position.from_state({**POSITION.to_state(), **changes})


def test_a_record_from_before_layouts_and_stateful_loaders_is_read() -> None:
    state = POSITION.to_state()
    for name in ("layout", "loader", "stream"):
        del state[name]
    found = Position.from_state(state)
    assert (found.consumed, found.layout, found.loader, found.stream) == (7, None, None, None)


@pytest.mark.parametrize("counts", [None, [], [1, 2], [1, 2, "3"], [1, 2, True], [0, 1, 1]])
def test_a_layout_is_three_positive_integers(counts: Any) -> None:
    with pytest.raises(ValueError, match="step layout"):
        StepLayout.from_list(counts)
    assert StepLayout.from_list([2, 3, 4]).samples_per_step == 24


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(17))


class Unread(Dataset[Any]):
    def __len__(self) -> int:
        return 3


def test_the_digest_tells_data_sets_apart() -> None:
    from datasets import Dataset as Rows

    one = Rows.from_dict({"text": [f"row {n}" for n in range(50)]})
    same, other = Rows.from_dict({"text": [f"row {n}" for n in range(50)]}), one.select(range(49))
    assert data_digest(one) == data_digest(same)
    assert data_digest(one) != data_digest(other)
    # A transform may draw at random: rows are looked at as they are stored.
    assert data_digest(one.with_transform(lambda rows: {"x": [random.random() for _ in rows["text"]]})) == data_digest(
        one
    )
    tensors = [{"x": torch.arange(3) + n} for n in range(20)]
    assert data_digest(tensors) == data_digest([dict(row) for row in tensors])
    assert data_digest(tensors) != data_digest([{"x": row["x"] + 1} for row in tensors])
    assert data_digest(Stream()) is None
    assert data_digest([]) is None


def test_parts_of_data_sets_and_their_sequence_are_told_apart() -> None:
    rows: Any = list(range(9))
    others: Any = list(range(1, 10))
    datasets: list[Any] = [
        Subset(rows, [1, 2]),
        Subset(rows, [2, 1]),
        Subset(others, [1, 2]),
        ConcatDataset([rows, others]),
        ConcatDataset([others, rows]),
    ]
    digests = [data_digest(dataset) for dataset in datasets]
    assert None not in digests and len(set(digests)) == len(digests)
    assert data_digest(Subset(rows, range(1, 3))) == digests[0]
    # What may not be read in a part may not be read in the whole.
    assert data_digest(Subset(Unread(), [1])) is None and data_digest(ConcatDataset([rows, Unread()])) is None


def test_the_number_of_rows_is_known_where_rows_may_not_be_read() -> None:
    assert [num_rows(dataset) for dataset in ([1, 2], Unread(), Stream(), {"a": [1]})] == ["2", "3", None, None]
