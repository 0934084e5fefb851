"""Which step ends a rehearsal; real training is never ended."""

from __future__ import annotations

import pytest

from checkpointing.host.environment import REHEARSAL_ENV
from checkpointing.manager.rehearsal import Rehearsal, ends_rehearsal, rehearsal


def test_a_process_knows_its_rehearsal_by_its_environment() -> None:
    short = Rehearsal(12, 4, "/a:b")
    assert rehearsal({REHEARSAL_ENV: "12:4:/a:b"}) == short
    assert rehearsal({}) is None


def test_only_a_rehearsal_ends_at_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REHEARSAL_ENV, raising=False)
    assert not ends_rehearsal(10**9)
    monkeypatch.setenv(REHEARSAL_ENV, "12:4:/x")
    assert [ends_rehearsal(step) for step in (11, 12, 13)] == [False, True, True]
