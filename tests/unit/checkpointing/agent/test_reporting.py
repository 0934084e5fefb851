"""When retries and progress are reported."""

from __future__ import annotations

from unit.checkpointing.agent.doubles import Clock, Reports

from checkpointing.agent.events import StorageRetried, Transfer
from checkpointing.agent.reporting import RetryCounter, progress_reporter, text_of
from checkpointing.errors import CommitFailed


def test_retries_are_reported_at_once_then_once_per_minute_and_at_the_end_of_a_task() -> None:
    clock, reports = Clock(), Reports()
    counter = RetryCounter("remote", reports, clock)
    for reason in ("a", "b", "c"):
        counter.add(reason)
    assert reports.results == [StorageRetried(tier="remote", count=1, reason="a")]
    clock.now += 60
    counter.add("d")
    assert reports.results[1:] == [StorageRetried(tier="remote", count=3, reason="d")]
    counter.add("e")
    counter.flush()
    counter.flush()
    assert reports.results[2:] == [StorageRetried(tier="remote", count=1, reason="e")]


def test_progress_is_reported_twice_per_second() -> None:
    clock, reports = Clock(), Reports()
    transferred = progress_reporter("upload", 5, 100, reports, clock)
    for _ in range(10):
        clock.now += 0.25
        transferred(10)
    assert [event.done for event in reports.results if isinstance(event, Transfer)] == [20, 40, 60, 80, 100]


def test_errors_are_told_as_a_user_reads_them() -> None:
    assert text_of(OSError(28, "No space left on device", "/x")) == "No space left on device"
    assert text_of(CommitFailed("checkpoint-5 could not be written")) == "checkpoint-5 could not be written"
    assert text_of(KeyError("x")) == "KeyError: 'x'"
