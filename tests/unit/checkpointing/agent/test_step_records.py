"""The rings of a node's ranks outlive the ranks, and become files where a later process needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checkpointing.agent.step_records import StepRecords
from checkpointing.format.layout import step_record_name
from checkpointing.format.step_record import RING_BYTES, StepRecord, StepRing, parse_records

HISTORY = 7


@pytest.fixture
def records() -> Iterator[StepRecords]:
    made = StepRecords()
    yield made
    for memory in made._rings.values():
        memory.close()


def put(records: StepRecords, local_rank: int, rank: int, *steps: int) -> None:
    ring = StepRing(records.of_rank(local_rank, rank).buffer[:RING_BYTES], HISTORY)
    for step in steps:
        ring.put(StepRecord(step, {"loss": step}))


def test_the_next_process_of_a_rank_reads_what_the_last_one_wrote(records: StepRecords) -> None:
    put(records, 0, 2, 4, 5)
    ring = StepRing(records.of_rank(0, 2).buffer[:RING_BYTES], HISTORY)
    assert list(ring.records()) == [4, 5]


def test_only_records_of_steps_that_are_lost_become_files(records: StepRecords) -> None:
    """What a checkpoint holds need not be kept besides it."""
    put(records, 0, 2, 4, 5)
    put(records, 1, 3, 4)
    files = dict(records.files_after(4))
    assert list(files) == [step_record_name(2)]
    assert list(parse_records(files[step_record_name(2)], HISTORY)) == [4, 5]
    assert not dict(records.files_after(5))


def test_a_ring_that_nothing_was_written_to_is_no_file(records: StepRecords) -> None:
    records.of_rank(0, 0)
    assert not dict(records.files_after(0))


def test_a_file_is_of_the_rank_that_the_process_has_now(records: StepRecords) -> None:
    """After nodes have left, a local rank has another number."""
    put(records, 1, 3, 9)
    records.of_rank(1, 1)
    assert [name for name, _ in records.files_after(0)] == [step_record_name(1)]
