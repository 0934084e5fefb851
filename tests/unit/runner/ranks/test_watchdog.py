"""Hangs by heartbeats alone, on a clock of the test's own."""

from __future__ import annotations

import pytest

from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.config.schema import RestartConfig
from runner.ranks.watchdog import Hang, StoppedProcesses, Watchdog

LIMITS = RestartConfig(hang_timeout_s=None, first_step_timeout_s=100.0, quiet_timeout_s=50.0)


class Ranks:
    """Two ranks that are looked at twice a second."""

    def __init__(self, limits: RestartConfig = LIMITS, *, watch_start: bool = True) -> None:
        self.now = 1000.0
        self.watchdog = Watchdog(limits, watch_start=watch_start, now=self.now)
        self.beats = [Heartbeat(Phase.STARTING, 0, 0.0, 0, 0.0) for _ in range(2)]

    def beat(self, phase: Phase, step: int, step_s: float = 0.0, slots: tuple[int, ...] = (0, 1)) -> None:
        for slot in slots:
            self.beats[slot] = Heartbeat(phase, step, 0.0, 0, 1.0, step_s, self.beats[slot].beats + 1)

    def wait(self, seconds: float) -> Hang | None:
        """Look until that much time has passed; the first hang that was seen."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            hang = self.watchdog.look(self.beats, self.now)
            if hang is not None:
                return hang
        return None

    def train(self, steps: int, step_s: float) -> None:
        self.beat(Phase.TRAINING, 0)
        assert self.wait(0.5) is None
        for step in range(1, steps + 1):
            self.beat(Phase.TRAINING, step, step_s)
            assert self.wait(step_s) is None


@pytest.mark.parametrize("step_s", [0.01, 2.0, 40.0])
def test_a_step_may_take_three_times_the_slowest_of_this_run_and_five_seconds(step_s: float) -> None:
    ranks = Ranks()
    ranks.train(10, step_s)
    began = ranks.now - step_s
    hang = ranks.wait(1000.0)
    assert hang is not None and 3 * step_s + 5 < ranks.now - began <= 3 * step_s + 5 + 1.0
    assert "99th percentile" in hang.reason and "after step 10 (training)" in hang.reason


def test_the_99th_percentile_forgives_one_slow_step_in_many_but_not_a_slow_run() -> None:
    ranks = Ranks()
    ranks.train(300, 0.5)
    assert ranks.watchdog.p99_s == 0.5
    ranks.beat(Phase.TRAINING, 301, 4.0)
    ranks.wait(0.5)
    assert ranks.watchdog.p99_s == 0.5
    for step in range(302, 320):
        ranks.beat(Phase.TRAINING, step, 4.0)
        ranks.wait(4.0)
    assert ranks.watchdog.p99_s == 4.0


def test_a_later_attempt_may_be_more_patient() -> None:
    ranks = Ranks()
    ranks.watchdog.patience = 4.0
    ranks.train(10, 1.0)
    assert ranks.wait(30.0) is None
    hang = ranks.wait(10.0)
    assert hang is not None and "4 x (3 x the 99th percentile" in hang.reason and ranks.watchdog.patience_used_up


@pytest.mark.parametrize(
    ("phase", "limits"), [(Phase.SAVING, LIMITS), (Phase.TRAINING, LIMITS.model_copy(update={"hang_timeout_s": 3.0}))]
)
def test_patience_is_for_the_limit_of_steps_that_nobody_has_set(phase: Phase, limits: RestartConfig) -> None:
    ranks = Ranks(limits)
    ranks.watchdog.patience = 4.0
    ranks.train(10, 1.0)
    ranks.beat(phase, 10)
    assert ranks.wait(52.0) is not None and not ranks.watchdog.patience_used_up


def test_the_steps_of_another_training_are_measured_again() -> None:
    ranks = Ranks()
    ranks.train(10, 0.05)
    for slot in range(2):
        ranks.beats[slot] = Heartbeat(Phase.TRAINING, 0, 0.0, 0, 700.0, 0.0, 50)
    for step in (1, 2):
        for slot in range(2):
            ranks.beats[slot] = Heartbeat(Phase.TRAINING, step, 0.0, 0, 700.0, 8.0, 50 + step)
        assert ranks.wait(8.0) is None


def test_ranks_that_prepare_for_longer_than_others_do_not_hang() -> None:
    """A script that downloads its data first, say."""
    ranks = Ranks(watch_start=False)
    assert ranks.wait(1000.0) is None
    ranks.beat(Phase.RESTORING, 0, slots=(0,))
    assert ranks.wait(20.0) is None
    assert ranks.wait(40.0) is not None


def test_the_rank_that_is_behind_is_named_first() -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    ranks.beat(Phase.TRAINING, 11, 0.5, slots=(0,))
    hang = ranks.wait(100.0)
    assert (hang is not None and hang.slots[0] == 1) or (hang is not None and hang.slots == (1,))
    assert "after step 10" in hang.reason


@pytest.mark.parametrize(
    ("phase", "limit"), [(Phase.IDLE, 50.0), (Phase.SAVING, 50.0), (Phase.RESTORING, 50.0), (Phase.COMPILING, 100.0)]
)
def test_what_is_no_step_has_its_own_limit(phase: Phase, limit: float) -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    ranks.beat(phase, 10)
    ranks.wait(0.5)
    assert ranks.wait(limit - 1.0) is None
    assert ranks.wait(2.0) is not None


def test_signs_of_life_between_batches_of_an_evaluation() -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    for _ in range(20):
        ranks.beat(Phase.IDLE, 10)
        assert ranks.wait(40.0) is None


def test_the_first_steps_may_take_long() -> None:
    ranks = Ranks()
    ranks.beat(Phase.TRAINING, 0)
    ranks.wait(0.5)
    assert ranks.wait(98.0) is None
    ranks.beat(Phase.TRAINING, 1, 98.0)
    ranks.wait(0.5)
    # Too few to know how long a step takes.
    assert ranks.wait(98.0) is None
    assert ranks.wait(3.0) is not None


def test_a_fixed_limit_goes_before_the_measured_one() -> None:
    ranks = Ranks(LIMITS.model_copy(update={"hang_timeout_s": 30.0}))
    ranks.train(10, 0.5)
    assert ranks.wait(28.0) is None
    hang = ranks.wait(3.0)
    assert hang is not None and "restart.hang_timeout_s" in hang.reason


def test_start_up_is_watched_where_a_sign_of_life_is_due() -> None:
    assert Ranks().wait(49.0) is None
    assert Ranks().wait(51.0) is not None
    # A script that does not use our checkpoints never gives one.
    assert Ranks(watch_start=False).wait(10000.0) is None
    ranks = Ranks(watch_start=False)
    ranks.beat(Phase.TRAINING, 0, slots=(0,))
    hang = ranks.wait(51.0)
    assert hang is not None and hang.slots == (1,)


def test_a_script_may_do_what_it_likes_after_training_the_default_job_may_not() -> None:
    for watch_start, hangs in ((False, False), (True, True)):
        ranks = Ranks(watch_start=watch_start)
        ranks.train(5, 0.5)
        ranks.beat(Phase.DONE, 5)
        ranks.wait(0.5)
        assert ranks.wait(49.0) is None
        assert (ranks.wait(10000.0) is not None) is hangs


@pytest.mark.parametrize("phase", [Phase.COMPILING, Phase.SAVING, Phase.IDLE])
def test_who_waits_for_a_busy_rank_does_not_hang(phase: Phase) -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    ranks.beat(phase, 10, slots=(1,))
    ranks.wait(0.5)
    assert ranks.wait(48.0) is None and ranks.watchdog.busy
    hang = ranks.wait(60.0)
    assert hang is not None and 1 in hang.slots


@pytest.mark.parametrize("phase", [Phase.COMPILING, Phase.SAVING, Phase.IDLE])
def test_who_has_waited_for_a_busy_rank_may_finish_its_step(phase: Phase) -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    ranks.beat(phase, 10, slots=(1,))
    assert ranks.wait(40.0) is None
    ranks.beat(Phase.TRAINING, 10, slots=(1,))
    assert ranks.wait(6.0) is None, "rank 0's silence was rank 1's"
    assert ranks.wait(2.0) is not None, "and this one is its own"


def test_who_waits_for_a_busy_rank_of_another_machine_does_not_hang() -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    for _ in range(100):
        ranks.now += 0.5
        assert ranks.watchdog.look(ranks.beats, ranks.now, others_busy=True) is None
    assert ranks.wait(6.0) is None
    assert ranks.wait(2.0) is not None


def test_whoever_was_stopped_himself_blames_nobody() -> None:
    ranks = Ranks()
    ranks.train(10, 0.5)
    ranks.now += 3600.0
    assert ranks.watchdog.look(ranks.beats, ranks.now) is None
    assert ranks.wait(4.0) is None
    assert ranks.wait(4.0) is not None


def test_a_stopped_process_is_found_whatever_it_was_doing() -> None:
    stopped = StoppedProcesses()
    for second in range(4):
        assert stopped.look({0: "S", 1: "T"}, 100.0 + second) == []
    assert stopped.look({0: "S", 1: "T"}, 104.0) == [1]
    # It was let go, and stopped again.
    assert stopped.look({0: "S", 1: "R"}, 105.0) == []
    assert stopped.look({0: "S", 1: "T"}, 106.0) == []
    # The watching process was stopped, too.
    assert stopped.look({0: "T", 1: "T"}, 200.0) == []
    # A debugger is at work.
    for second in range(20):
        assert stopped.look({0: "t", 1: "S"}, 201.0 + second) == []
