"""A file system that fails between attempts is waited out, as long as that may help."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay

from runner.supervisor.supervisor import Faltering


class Bench:
    def __init__(self, patience_s: float = 600.0) -> None:
        self.now, self.display = 100.0, FakeDisplay()
        self.session: Any = SimpleNamespace(
            monotonic=lambda: self.now, sleep=self._sleep, stop=False, display=self.display
        )
        self.faltering = Faltering(patience_s)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def fail(self, number: int, path: str | None = "/run/journal.jsonl") -> None:
        self.faltering.wait(OSError(number, "it failed", path), self.session)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.ENOTCONN])
def test_what_may_pass_is_waited_for_and_said_once(number: int) -> None:
    """A stale handle of 8 s ended the run, with the snapshots that were in memory."""
    bench = Bench()
    for _ in range(8):
        bench.fail(number)
    assert bench.now == 108.0
    assert bench.display.texts == ["/run/journal.jsonl: it failed; trying again for 600 s"]
    bench.faltering.over()
    bench.fail(number)
    assert len(bench.display.texts) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT])
def test_what_only_people_change_ends_the_run(number: int) -> None:
    with pytest.raises(OSError, match="it failed"):
        Bench().fail(number)


def test_patience_ends() -> None:
    bench = Bench(patience_s=5.0)
    with pytest.raises(OSError, match="it failed"):
        for _ in range(100):
            bench.fail(errno.ESTALE)
    assert 105 <= bench.now <= 107


def test_a_stop_request_ends_the_wait() -> None:
    bench = Bench()
    bench.session.stop = True
    with pytest.raises(OSError, match="it failed"):
        bench.fail(errno.ESTALE)
