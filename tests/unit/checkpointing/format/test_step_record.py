"""The step record as bytes: what it keeps, what it forgets, and what it does not believe."""

from __future__ import annotations

import math

import pytest

from checkpointing.format import step_record
from checkpointing.format.step_record import (
    CAPACITY,
    FIELDS,
    FILE_STEPS,
    RECORD_BYTES,
    RING_BYTES,
    StepRecord,
    StepRing,
    float_bits,
    newest_step,
    parse_records,
)


def ring(history: int = 7) -> StepRing:
    return StepRing(memoryview(bytearray(RING_BYTES)), history)


def record(step: int, **values: int) -> StepRecord:
    return StepRecord(step, values or {"batch": step, "loss": float_bits(0.5)}, tokens=step * 2)


@pytest.mark.parametrize("names", [(), FIELDS[:1], FIELDS[3:6], FIELDS])
def test_a_record_is_read_as_it_was_written(names: tuple[str, ...]) -> None:
    values = {name: (1 << 64) - 1 - number for number, name in enumerate(names)}
    written = StepRecord(123, values, tokens=4096, differed=names[1:3])
    assert StepRecord.unpack(written.pack(9), 9) == written


def test_a_record_of_another_history_counts_as_missing() -> None:
    assert StepRecord.unpack(record(1).pack(9), 8) is None


@pytest.mark.parametrize("place", range(RECORD_BYTES))
def test_a_record_that_a_kill_has_torn_counts_as_missing(place: int) -> None:
    data = bytearray(record(1).pack(9))
    data[place] ^= 4
    assert StepRecord.unpack(bytes(data), 9) is None


def test_a_ring_holds_the_newest_steps() -> None:
    kept = ring()
    for step in range(1, CAPACITY + 11):
        kept.put(record(step))
    assert list(kept.records()) == list(range(11, CAPACITY + 11))
    assert kept.get(10) is None and kept.get(11) == record(11)


def test_a_step_that_is_computed_again_replaces_its_record_and_no_later_one() -> None:
    kept = ring()
    for step in range(1, 14):
        kept.put(record(step))
    kept.put(record(11, batch=1))
    assert kept.get(11) == record(11, batch=1) and kept.get(12) == record(12)


def test_a_file_ends_with_its_step_whatever_was_recorded_since() -> None:
    kept = ring()
    for step in range(1, CAPACITY + 1):
        kept.put(record(step))
    last = CAPACITY - 3
    assert list(parse_records(kept.to_bytes(last), 7)) == list(range(last - FILE_STEPS + 1, last + 1))


def test_a_file_that_is_cut_short_gives_what_it_has() -> None:
    kept = ring()
    for step in (1, 2, 3):
        kept.put(record(step))
    assert list(parse_records(kept.to_bytes()[:-1], 7)) == [1, 2]


def test_equal_steps_have_equal_files() -> None:
    """Checkpoints of equal runs are equal, byte for byte."""
    one, other = ring(), ring()
    for step in range(1, 30):
        one.put(record(step))
    for step in (5, 6, *range(1, 30)):
        other.put(record(step))
    assert one.to_bytes() == other.to_bytes()


def test_the_newest_step_is_that_of_any_history() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    assert newest_step(memory) == 0
    StepRing(memory, 1).put(record(5))
    StepRing(memory, 2).put(record(8))
    assert newest_step(memory) == 8


def test_differences_are_of_what_both_know_with_the_cause_first() -> None:
    one, other = record(1, batch=1, loss=2, torch=3), record(1, loss=4, batch=5, numpy=6, torch=3)
    assert one.differences(other) == ("batch", "loss")
    assert one.differences(record(1, python=1)) == ()


def test_numbers_are_compared_by_their_bits() -> None:
    assert float_bits(0.0) != float_bits(-0.0)
    assert float_bits(math.nan) == float_bits(math.nan)


def test_another_rank_or_number_of_ranks_is_another_history() -> None:
    found = {step_record.history_of(stage, rank, size) for stage in "ab" for rank, size in [(0, 1), (0, 2), (1, 2)]}
    assert len(found) == 6
