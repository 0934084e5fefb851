"""Snapshots of a device that copies late: a staged snapshot is the state of one step, whatever changes meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from helpers.late_device import LateDevice, LateMark
from helpers.small_training import SmallTraining

from checkpointing.process import device as devices
from checkpointing.snapshot import copy_thread
from checkpointing.state import samples


class Job(SmallTraining):
    """On a device that copies late; waiting for the end of a snapshot does not block on the test."""

    def __init__(self, *, overlap: bool | None, foreign: bool) -> None:
        self.device = LateDevice()
        super().__init__(overlap=overlap, foreign=foreign, device=self.device)

    def snapshot(self, *, commit: bool = False) -> None:
        with self.device.hurried():
            self.snapshotter.settle()
        super().snapshot(commit=commit)

    def close(self) -> None:
        with self.device.hurried():
            super().close()


# Writes that torch does not count.
UNCOUNTED = [
    "clamp",
    "swap_in",
    "swap_out",
    "replace_memory",
    "set_memory",
    "write_view",
    "write_natively",
    "write_moment",
]
# What a script may do between two checks of the device.
CHANGES = ["optimizer_step", "replayed_step", "skipped_step", "update_average", "forward_in_training", "write_directly"]


def interleave(number: int, also: Sequence[str] = ()) -> Job:
    """Train, snapshot and let the device copy, in an order drawn from a seed; returns the job, closed.

    Args:
        also: Changes, of which at least one is made, besides `CHANGES`.
    """
    draw = random.Random(number)
    job = Job(overlap=draw.choice([None, True, False]), foreign=draw.random() < 0.2)
    changes = draw.sample(CHANGES, draw.randint(1, len(CHANGES)))
    changes += draw.sample(also, draw.randint(1, len(also))) if also else []
    for _ in range(draw.randint(2, 12)):
        match draw.choice(["snapshot", "change", "change", "run", "enqueue"]):
            case "snapshot":
                job.snapshot()
            case "change":
                getattr(job, draw.choice(changes))()
            case "run":
                job.device.run_some(draw.randint(1, 8))
            case "enqueue":
                copy = job.snapshotter._copy_thread.current
                if copy is not None:
                    copy.enqueued.wait()
    job.close()
    return job


def explore(seeds: Iterable[int], also: Sequence[str] = ()) -> tuple[int | None, int]:
    """The first seed of which a torn snapshot was staged, and how many snapshots were staged up to it."""
    num_staged = 0
    for number in seeds:
        job = interleave(number, also)
        num_staged += len(job.arenas.staged_steps)
        if job.torn():
            return number, num_staged
    return None, num_staged


def test_what_is_staged_is_the_state_of_one_step() -> None:
    """`LATE_DEVICE_RUNS=20000` for more; `LATE_DEVICE_SEED` is the first seed."""
    runs, first = int(os.environ.get("LATE_DEVICE_RUNS", "100")), int(os.environ.get("LATE_DEVICE_SEED", "0"))
    torn, num_staged = explore(range(first, first + runs))
    print(f"{runs} interleavings from seed {first}: {num_staged} snapshots were staged")
    assert torn is None
    assert num_staged > runs / 2


def test_what_is_staged_is_the_state_of_one_step_whatever_writes() -> None:
    """20,000 of them, with the devices of `tests/second_device`: `LATE_DEVICE_RUNS=20000`."""
    runs, first = int(os.environ.get("LATE_DEVICE_RUNS", "100")), int(os.environ.get("LATE_DEVICE_SEED", "0"))
    torn, num_staged = explore(range(first, first + runs), UNCOUNTED)
    print(f"{runs} interleavings from seed {first}: {num_staged} snapshots were staged")
    assert torn is None
    assert num_staged > runs / 3


def test_without_samples_what_is_torn_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples.Samples, "torn", lambda *_: [])
    torn, _ = explore(range(100), UNCOUNTED)
    assert torn is not None


def enqueued_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host continues when a copy is enqueued, and so does the device."""
    monkeypatch.setattr(copy_thread.Copy, "hold", lambda copy, **_: copy.enqueued.wait())
    monkeypatch.setattr(copy_thread.Copy, "hold_volatile", lambda copy: copy.volatile.wait())


def counted_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version counters are compared before the device has copied."""
    copied = copy_thread.Copy.copied

    def count_first(copy: copy_thread.Copy, count: Callable[[], int] = int) -> None:
        copy.changed = count()
        copied(copy, count)

    monkeypatch.setattr(copy_thread.Copy, "copied", count_first)


def replays_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the product: graph replays are not announced, and a step that ends without the barrier passes."""
    monkeypatch.setattr(devices, "announce_replay", lambda: None)
    monkeypatch.setattr(copy_thread.Copy, "end_step", lambda copy: None)


@pytest.mark.parametrize("broken", [enqueued_is_copied, counted_too_early, replays_pass])
def test_the_exploration_finds(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # They would find most of it, too.
    monkeypatch.setattr(samples.Samples, "torn", lambda *_: [])
    broken(monkeypatch)
    torn, _ = explore(range(600))
    assert torn is not None


def test_a_step_without_an_optimizer_drops_what_is_being_copied() -> None:
    job = Job(overlap=True, foreign=False)
    job.snapshot()
    job.skipped_step()
    job.close()
    assert not job.arenas.staged_steps and "no optimizer stepped" in job.arenas.abandoned[0]


def test_a_later_step_does_not_clear_the_doubt() -> None:
    """The helper thread may check only after the next step has ended."""
    copy = copy_thread.Copy(lambda _: None)
    copy.end_step()
    copy.passed_barrier = True
    copy.end_step()
    assert copy.is_doubtful


def test_after_it_training_waits_until_an_optimizer_has_stepped() -> None:
    job = Job(overlap=True, foreign=False)
    job.skipped_step()
    job.snapshot()
    # It does not overlap with training: on the device, the copy has ended.
    assert job.device.num_waiting == 0
    job.optimizer_step()
    job.snapshot()
    job.snapshotter._copy_thread.current.enqueued.wait()  # type: ignore[union-attr]
    assert job.device.num_waiting > 0
    job.close()
    assert job.torn() == [] and set(job.arenas.staged_steps) == {1, 2}


def test_a_cost_that_is_not_known_yet_is_learned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead has settled a snapshot before its device has passed the marks."""
    job = Job(overlap=True, foreign=False)
    job.snapshot()
    job.optimizer_step()
    job.snapshot()
    costs = job.snapshotter.costs
    assert len(costs._costs[True]) == 1
    passed = False
    monkeypatch.setattr(LateMark, "is_passed", property(lambda mark: passed))
    job.optimizer_step()
    job.snapshot()
    assert len(costs._costs[True]) == 1 and len(job.snapshotter._unmeasured) == 1
    passed = True
    job.optimizer_step()
    assert len(costs._costs[True]) >= 2 and job.snapshotter._unmeasured == []
    job.close()
