from __future__ import annotations

import random

import pytest

from checkpointing.manager.spikes import SkippedSteps, SpikeDetector


def noisy(number: int, seed: int = 0) -> list[float]:
    dice = random.Random(seed)
    return [2.0 + dice.gauss(0, 0.1) for _ in range(number)]


def test_what_stands_out_is_told_and_counts_for_nothing() -> None:
    detector = SpikeDetector(8.0, noisy(64))
    before = list(detector.losses)
    told = detector.look(4.0)
    assert told is not None and told.startswith("4, ") and "median 1.99" in told and "last 64" in told
    assert list(detector.losses) == before
    assert detector.look(float("nan")) is not None and detector.look(float("inf")) is not None
    assert detector.look(2.3) is None and detector.losses[-1] == 2.3


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_a_falling_loss_are_no_spikes(seed: int) -> None:
    detector = SpikeDetector(8.0)
    assert not any(detector.look(loss * 0.99**step) for step, loss in enumerate(noisy(500, seed)))


def test_nothing_is_told_before_there_is_something_to_compare_with() -> None:
    detector = SpikeDetector(8.0)
    assert [detector.look(loss) for loss in [1.0, 90.0] * 8] == [None] * 16


def test_equal_losses_make_no_spike_of_the_next() -> None:
    detector = SpikeDetector(8.0, [2.0] * 64)
    assert detector.look(2.1) is None and detector.look(3.0) is not None


def test_windows_of_steps() -> None:
    skipped = SkippedSteps([(41, 45), (60, 60)])
    assert [step for step in range(100) if step in skipped] == [41, 42, 43, 44, 45, 60]
    assert 0 not in SkippedSteps()
