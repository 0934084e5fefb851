"""The copy thread and the barrier before optimizer steps, on the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from checkpointing.process import device
from checkpointing.snapshot.copy_thread import Copy, CopyThread


@pytest.fixture
def thread() -> Iterator[CopyThread]:
    thread = CopyThread()
    yield thread
    thread.close()


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=1.0)


def test_an_optimizer_waits_for_the_copy_and_not_for_the_rest(thread: CopyThread) -> None:
    may_copy, may_end, seen = threading.Event(), threading.Event(), []
    own = optimizer()
    parameter = own.param_groups[0]["params"][0].detach()

    def work(copy: Copy) -> None:
        may_copy.wait(10)
        seen.append(float(parameter))
        copy.copied()
        may_end.wait(10)

    copy = thread.submit(work)
    threading.Timer(0.05, may_copy.set).start()
    own.step()
    assert seen == [0.0] and float(parameter) == -1.0
    assert copy.passed_barrier and not copy.finished.is_set() and copy.blocked_s > 0.01
    may_end.set()
    assert thread.settle() is copy and thread.current is None and thread.settle() is None


@pytest.mark.parametrize("passes", ["optimizer", "replay"])
def test_a_failure_is_raised_once_where_the_state_would_change(thread: CopyThread, passes: str) -> None:
    def work(copy: Copy) -> None:
        raise RuntimeError("no space")

    copy = thread.submit(work)
    copy.finished.wait(10)
    with pytest.raises(RuntimeError, match="no space"):
        if passes == "optimizer":
            optimizer().step()
        else:
            device.announce_replay()
    thread.settle()
    optimizer().step()


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_at_the_barrier_is_no_slow_step(waits: bool) -> None:
    """The copy may wait for memory, or for storage where there is no memory."""
    may_copy, seen = threading.Event(), []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        seen.append("waits")
        may_copy.set()
        yield
        seen.append("goes on")

    thread = CopyThread(waiting=waiting)
    copy = thread.submit(lambda copy: copy.copied() if may_copy.wait(10) else None)
    if not waits:
        may_copy.set()
        copy.enqueued.wait(10)
    optimizer().step()
    assert seen == (["waits", "goes on"] if waits else [])
    thread.close()


def test_only_optimizers_are_reported() -> None:
    steps: list[int] = []
    thread = CopyThread(on_optimizer_step=lambda: steps.append(1))
    device.announce_replay()
    optimizer().step()
    thread.close()
    optimizer().step()
    assert steps == [1]


def test_changes_are_counted_once() -> None:
    counts = iter([3, 5])
    copy = Copy(lambda _: None)
    copy.begin()
    copy.copied(lambda: next(counts))
    copy.count_changed()
    assert copy.changed == 3
    copy.end_step()
    assert not copy.is_doubtful


class Queue(device.HostDevice):
    """A device that passes what is enqueued when the test says so; a position in its queue is a second."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.end = self.passed = 0

    def mark(self) -> Position:
        return Position(self, self.end)

    def hold(self, mark: device.DeviceMark) -> None:
        self.end += 3


class Position:
    def __init__(self, queue: Queue, at: int) -> None:
        self._queue, self._at = queue, at

    @property
    def is_passed(self) -> bool:
        return self._queue.passed >= self._at

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Position) -> float | None:
        return float(self._at - earlier._at)


def test_the_time_that_a_device_waits_is_known_once_it_has_passed(thread: CopyThread) -> None:
    queue = Queue()
    copy = thread.submit(lambda copy: copy.copied(), queue)
    copy.finished.wait(10)
    optimizer().step()
    assert not copy.is_measured and copy.waited_s < 1.0
    queue.passed = queue.end
    # The host has not waited.
    assert copy.is_measured and copy.device_waited_s(at_barrier=True) == 3.0 and copy.blocked_s < 1.0
    assert copy.device_waited_s(at_barrier=False) == 0.0
    thread.settle()
    # Both wait for the same end: it is counted once.
    copy.settling_s = 5.0
    assert copy.waited_s == pytest.approx(5.0 + copy.blocked_s)
    # Of these, 2 s are the host's alone.
    assert copy.waited_s - copy.device_waited_s(at_barrier=True) == pytest.approx(2.0 + copy.blocked_s)
