from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
from collections import Counter
from itertools import chain
from typing import Any

import datasets
import pytest
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from packaging.version import Version

from checkpointing.data.stream import StreamBatches, StreamDataLoader, StreamPosition, beginning_of
from checkpointing.errors import CheckpointError


def stream(num_rows: int = 100, num_shards: int = 3, pairs: bool = False) -> Any:
    """Rows 0, 1, ...; `pairs`: two by two, as packing makes one row of several."""
    rows = Dataset.from_dict({"n": range(num_rows)}).to_iterable_dataset(num_shards=num_shards)
    if pairs:
        rows = rows.map(
            lambda batch: {"n": [batch["n"][i : i + 2] for i in range(0, len(batch["n"]), 2)]}, batched=True
        )
    return rows


def numbers(batch: list[dict[str, Any]]) -> list[Any]:
    return [row["n"] for row in batch]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("shuffle_samples", [None, 7])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("read", [1, 13, 40])
def test_a_stream_is_read_on_from_its_position(
    read: int, num_workers: int, shuffle_samples: int | None, pairs: bool
) -> None:
    def loader() -> StreamDataLoader:
        batches = StreamBatches(stream(pairs=pairs), 3, 0, 1, seed=5, shuffle_samples=shuffle_samples)
        return StreamDataLoader(batches, numbers, num_workers)

    whole = list(itertools.islice(loader(), 80))
    first = loader()
    assert list(itertools.islice(first, read)) == whole[:read]
    position = StreamPosition.from_json(json.loads(json.dumps(first.position.to_json())))
    second = loader()
    second.start_at(position)
    assert list(itertools.islice(second, 80 - read)) == whole[read:]


@pytest.mark.parametrize("shuffle_samples", [None, 8, 1000])
def test_a_stream_is_the_same_for_every_number_of_ranks(shuffle_samples: int | None) -> None:
    steps = {}
    for world_size in (1, 2, 4):
        ranks = [
            StreamBatches(stream(), 8 // world_size, rank, world_size, shuffle_samples=shuffle_samples)
            for rank in range(world_size)
        ]
        drawn = zip(*(itertools.islice(rank, 25) for rank in ranks), strict=True)
        steps[world_size] = [[row["n"] for rows, _ in step for row in rows] for step in drawn]
    assert steps[1] == steps[2] == steps[4]
    epochs = [list(chain(*steps[1]))[start : start + 100] for start in (0, 100)]
    assert all(Counter(epoch) == Counter(range(100)) for epoch in epochs)
    assert (epochs[0] == epochs[1] == list(range(100))) == (shuffle_samples is None)


def test_a_stream_that_was_read_already_begins_anew() -> None:
    rows = stream()
    beginning = rows.state_dict()
    readers = [StreamBatches(rows, 4, 0, 1, beginning=beginning) for _ in range(2)]
    assert [numbers(next(iter(reader))[0]) for reader in readers] == [[0, 1, 2, 3]] * 2


def test_what_cannot_be_a_stream_is_refused() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"n": {1, 2}}

    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        StreamBatches(Odd(), 1, 0, 1)
    empty = StreamBatches(stream(3).filter(lambda row: False), 1, 0, 1)
    with pytest.raises(ValueError, match="no rows"):
        next(iter(empty))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_can_be_read_over(num_workers: int) -> None:
    whole = list(itertools.islice(StreamDataLoader(StreamBatches(stream(), 3, 0, 1), numbers, num_workers), 20))
    second = StreamDataLoader(StreamBatches(stream(), 3, 0, 1), numbers, num_workers)
    second.drop_first(12)
    assert list(itertools.islice(second, 8)) == whole[12:] and not second.is_positioned


def test_no_sample_waits_for_a_whole_block() -> None:
    read: list[int] = []

    class Counted:
        """100 rows, and which of them were read."""

        def state_dict(self) -> dict[str, Any]:
            return {"at": len(read) % 100}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def __iter__(self) -> Any:
            for number in range(100):
                read.append(number)
                yield {"n": number}

    batches = iter(StreamBatches(Counted(), 1, 0, 1, shuffle_samples=20))
    next(batches)
    before = len(read)
    for _ in range(60):
        next(batches)
        assert len(read) - before <= 1, "one at a time"
        before = len(read)


def test_another_order_is_refused() -> None:
    position = StreamBatches(stream(), 3, 0, 1, seed=5, shuffle_samples=7).start
    for options in ({"seed": 5}, {"seed": 6, "shuffle_samples": 7}, {"seed": 5, "shuffle_samples": 8}):
        with pytest.raises(CheckpointError, match="position in the stream does not fit"):
            StreamBatches(stream(), 3, 0, 1, **options).start_at(position)  # type: ignore[arg-type]


@pytest.mark.skipif(Version(datasets.__version__) < Version("4.8.5"), reason="this datasets is refused")
def test_a_stream_that_was_read_from_begins_at_its_beginning() -> None:
    rows, fresh = stream(), stream()
    assert [row["n"] for row in itertools.islice(rows, 5)] == [0, 1, 2, 3, 4]
    assert beginning_of(rows) == fresh.state_dict()
    batches = StreamBatches(rows, 4, 0, 1, beginning=beginning_of(rows))
    assert numbers(next(iter(batches))[0]) == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="give it whole"):
        beginning_of(split_dataset_by_node(stream(), rank=0, world_size=2))


good = StreamPosition(1, 2, 3, {}, None, 0).to_json()


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {**good, "epoch": -1}, {**good, "block": 1.5}, {**good, "offset": True}, {**good, "state": 3},
     {**good, "offset": 2**64}, {**good, "more": 1}, {**good, "shuffle_samples": 0}, {**good, "seed": "1"}],
)  # fmt: skip
def test_a_document_that_is_not_a_position_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"in the stream|stream's state"):
        StreamPosition.from_json(document)


@pytest.mark.parametrize(("version", "works"), [("4.7.0", False), ("4.8.5", True), ("5.0.1", False), ("5.1.0", True)])
def test_a_library_that_resumes_streams_elsewhere_is_refused(
    version: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with contextlib.nullcontext() if works else pytest.raises(CheckpointError, match=f"datasets {version}"):
        beginning_of(stream())
