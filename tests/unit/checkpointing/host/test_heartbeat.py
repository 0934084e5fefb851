"""The page that a node's processes share."""

from __future__ import annotations

import os

import pytest

from checkpointing.host.heartbeat import CommitReport, ControlPage, Heartbeat, Phase


def test_what_one_process_writes_another_reads() -> None:
    page = ControlPage.create(2)
    other = ControlPage.attach(os.dup(page.fd))
    beat = Heartbeat(Phase.TRAINING, 5, 12.5, 1, 10.0, 0.5, 3)
    page.write(1, beat)
    page.stop_requested, page.saves_requested = True, 2**40
    page.last_commit = CommitReport(5, 1.5, 0.5)
    assert (other.read(1), other.read(0).phase) == (beat, Phase.STARTING)
    assert other.stop_requested and other.saves_requested == 2**40 and other.last_commit == CommitReport(5, 1.5, 0.5)
    other.clear()
    assert page.read(1).step == 0 and page.stop_requested and page.last_commit.step == 5
    other.close()
    page.close()


def test_a_slot_that_is_not_there_is_refused() -> None:
    page = ControlPage.create(1)
    with pytest.raises(ValueError, match="slot"):
        page.read(page.num_slots)
    assert ControlPage.create(1).last_commit == CommitReport()
