"""When a launcher that reports nothing is given up, and what its ranks had done until then."""

from __future__ import annotations

import pytest
from helpers.node_fakes import FakeRanks

from runner.launcher.launcher_check import LauncherCheck, Overdue


class Bench:
    """Two ranks, and a launcher that stays silent."""

    def __init__(self) -> None:
        self.ranks = FakeRanks()
        self.check = LauncherCheck(self.ranks, 2, 100.0, 1000.0)

    def overdue_after(self, seconds: int, *, killed: bool = False) -> Overdue | None:
        """Look every second."""
        found = None
        for second in range(seconds + 1):
            found = found or self.check.look(1000.0 + second, killed=killed)
        return found


def test_a_launcher_that_starts_no_rank() -> None:
    assert Bench().overdue_after(100) is None
    overdue = Bench().overdue_after(101)
    assert overdue is not None and "no rank was started within 100 s" in overdue.cause
    assert (overdue.finished, overdue.over) == (False, False)


def test_running_ranks_need_no_report() -> None:
    bench = Bench()
    bench.ranks.start(0, 1)
    assert bench.overdue_after(1000) is None


@pytest.mark.parametrize(("done", "finished"), [({0, 1}, True), ({0}, False)])
def test_ranks_that_are_gone(done: set[int], finished: bool) -> None:
    bench = Bench()
    bench.ranks.start(0, 1)
    bench.ranks.kill()
    bench.ranks.done |= done
    assert bench.overdue_after(60) is None
    overdue = bench.overdue_after(61)
    assert overdue is not None and (overdue.finished, overdue.over) == (finished, True)


def test_ranks_that_this_runner_has_killed_are_reported_soon() -> None:
    bench = Bench()
    bench.ranks.start(0)
    bench.ranks.kill()
    overdue = bench.overdue_after(6, killed=True)
    assert overdue is not None and overdue.over and "did not end with its ranks" in overdue.cause


def test_a_rank_that_has_not_started_yet_is_waited_for() -> None:
    bench = Bench()
    bench.ranks.start(0)
    bench.ranks.kill()
    assert bench.overdue_after(200) is None


def test_the_time_for_which_this_process_was_stopped_does_not_count() -> None:
    bench = Bench()
    bench.check.skip(500.0)
    assert bench.check.look(1599.0, killed=False) is None
    assert bench.check.look(1601.0, killed=False) is not None
