"""Pinned memory: registered during training, in ranges that contain whole pieces of a copy; a refusal does no harm."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small_training import SmallTraining
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.host.heartbeat import CommitReport
from checkpointing.host.shared_memory import PAGE_BYTES, SharedMemory
from checkpointing.process import device, pinning
from checkpointing.process.device import CHUNK_BYTES
from checkpointing.process.pinning import Pinning, ranges_to_pin
from checkpointing.snapshot import copy_thread
from checkpointing.snapshot import schedule as snapshotter
from checkpointing.snapshot import snapshot_copy as snapshot_maker
from checkpointing.snapshot.cadence import Cadence, CadenceClock

EXTENTS = st.lists(
    st.tuples(st.integers(0, 4 * CHUNK_BYTES), st.integers(0, 2 * CHUNK_BYTES)).map(lambda t: (t[0], t[0] + t[1])),
    max_size=8,
)


@given(EXTENTS)
def test_every_piece_of_a_copy_lies_in_one_registered_range(extents: list[tuple[int, int]]) -> None:
    ranges = ranges_to_pin(extents)
    assert all(begin % PAGE_BYTES == 0 == end % PAGE_BYTES and begin < end for begin, end in ranges)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    assert all(end - begin <= CHUNK_BYTES for begin, end in ranges)
    for begin, end in extents:
        pieces = [(begin + first, begin + last) for first, last in device.cut(begin, end - begin)]
        assert sum(last - first for first, last in pieces) == end - begin
        for first, last in pieces:
            assert sum(low <= first and last <= high for low, high in ranges) == 1


class Driver:
    """Registers memory, or refuses after so many bytes; registering blocks until `may_go` is set."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.registered: dict[int, int] = {}
        self.asked, self.may_go, self.limit = threading.Event(), threading.Event(), limit

    def register(self, address: int, nbytes: int) -> bool:
        self.asked.set()
        self.may_go.wait()
        if sum(self.registered.values()) + nbytes > self.limit:
            return False
        assert address not in self.registered
        self.registered[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device, pinning):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2 * PAGE_BYTES)


@pytest.mark.usefixtures("small_chunks")
def test_only_the_own_share_is_registered_and_nobody_waits_for_it() -> None:
    driver, reports = Driver(), []
    done = threading.Event()

    def report(*values: Any) -> None:
        reports.append(values)
        done.set()

    pins = Pinning(driver.register, driver.unregister, report)
    arena = memoryview(mmap.mmap(-1, 16 * PAGE_BYTES))
    share = [(3 * PAGE_BYTES + 5, 8 * PAGE_BYTES)]
    assert pins.want(arena, share)
    assert driver.asked.wait(10)
    # The driver does not answer: the copy is made all the same, and its price is not taken for the usual one.
    assert pins.is_busy and pins.want(arena, share)
    driver.may_go.set()
    assert done.wait(10)
    assert not pins.is_busy and not pins.want(arena, share)
    assert sorted(driver.registered.values()) == [PAGE_BYTES, 2 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert [(nbytes, complete) for nbytes, _, complete in reports] == [(5 * PAGE_BYTES, True)]
    pins.close()
    assert driver.registered == {}


@pytest.mark.usefixtures("small_chunks")
def test_an_arena_that_is_restored_from_is_registered_in_one_range() -> None:
    """A copy across the border of two ranges fails, and what restores does not cut its copies."""
    driver = Driver()
    selected: list[int] = []
    pins = Pinning(driver.register, driver.unregister, select=selected.append)
    arena = SharedMemory.create("test", 16 * PAGE_BYTES)
    # The state is on no accelerator yet.
    pins.want_all(arena)
    pins.pin(arena)
    assert not pins.is_busy
    pins.device_index = 3
    pins.want_all(arena)
    assert driver.asked.wait(10) and pins.is_busy
    threading.Timer(0.05, driver.may_go.set).start()
    pins.settle()
    assert list(driver.registered.values()) == [2 * PAGE_BYTES] * 8
    pins.pin(arena)
    pins.settle()
    assert driver.registered == {arena.address: 16 * PAGE_BYTES} and set(selected) == {3}
    # Nor is it registered again for the next snapshot.
    assert not pins.want(arena.buffer, [(0, 3 * PAGE_BYTES)])
    pins.release(arena)
    pins.close()
    assert driver.registered == {}


@pytest.mark.usefixtures("small_chunks")
def test_what_the_driver_refuses_in_one_range_is_tried_in_small_ones() -> None:
    driver = Driver(limit=4 * PAGE_BYTES)
    driver.may_go.set()
    pins = Pinning(driver.register, driver.unregister)
    pins.device_index = 0
    arena = SharedMemory.create("test", 16 * PAGE_BYTES)
    pins.pin(arena)
    pins.settle()
    assert driver.registered == {}
    assert pins.want(arena.buffer, [(0, 2 * PAGE_BYTES)])
    pins.settle()
    assert driver.registered == {arena.address: 2 * PAGE_BYTES}
    pins.close()


def test_a_driver_that_does_not_start_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    def broken(address: int, nbytes: int) -> bool:
        raise RuntimeError("no CUDA-capable device is detected")

    pins = Pinning(broken, lambda address: None)
    pins.device_index = 0
    for _ in range(2):
        pins.pin(SharedMemory.create("test", PAGE_BYTES))
        pins.settle()
    assert not pins.is_busy and len(caplog.records) == 1
    pins.close()


@pytest.mark.usefixtures("small_chunks")
def test_a_driver_that_refuses_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    driver = Driver(limit=2 * PAGE_BYTES)
    driver.may_go.set()
    pins = Pinning(driver.register, driver.unregister, lambda *values: done.set())
    arenas = [memoryview(mmap.mmap(-1, 8 * PAGE_BYTES)) for _ in range(2)]
    pins.want(arenas[0], [(0, 8 * PAGE_BYTES)])
    assert done.wait(10)
    assert not pins.want(arenas[1], [(0, 8 * PAGE_BYTES)])
    assert len(driver.registered) == 1 and [r.levelname for r in caplog.records] == ["WARNING"]
    pins.close()
    assert driver.registered == {}


class Runtime:
    """CUDA's: an error that a call has returned stays, until a kernel's launch looks for it."""

    def __init__(self) -> None:
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.error = 2
        return 2

    def ones(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        error, self.error = self.error, 0
        if error:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return torch.zeros(1)


def test_a_failed_registration_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.ones)
    assert not device.register(0, 1)
    assert runtime.error == 0


def test_auto_waits_for_memory_that_is_being_made_ready() -> None:
    """Else the price of pinning would be taken for that of a snapshot."""
    clock = CadenceClock(Cadence(snapshot_steps="auto", save_steps="auto"), 0.0)
    commit = CommitReport(5, 0.1, 0.1)
    assert clock.due_by_time(10.0, None, commit) == (True, True)
    assert clock.due_by_time(10.0, None, commit, preparing=True) == (False, False)
    # What the user has asked for by the clock is made at any price.
    clock = CadenceClock(Cadence(save_minutes=0.1), 0.0)
    assert clock.due_by_time(10.0, None, commit, preparing=True) == (False, True)


class ThirtyGigabytes(device.HostDevice):
    """A device whose state is 30 GB, and the driver of it, in virtual seconds: little memory stands for much."""

    is_asynchronous = True
    UNPINNED_S, PINNED_S = 30 / 8, 30 / 50

    def __init__(self, register_s_per_gb: float) -> None:
        self.now, self.register_s = 0.0, 30 * register_s_per_gb
        # Of the state.
        self.nbytes = 1
        self.registered_at: float | None = None
        self._asked, self._may_go = threading.Event(), threading.Event()
        self.pinning = Pinning(self._register, lambda address: None)

    def _register(self, address: int, nbytes: int) -> bool:
        self.registered_at = self.now + self.register_s
        self._asked.set()
        self._may_go.wait()
        return True

    def copy(self, buffer: memoryview, offset: int, source: torch.Tensor) -> None:
        super().copy(buffer, offset, source)
        # Virtual time stands still until the driver was asked.
        self._asked.wait()
        self.now += (
            (self.UNPINNED_S if self.register_s and self.pinning.is_busy else self.PINNED_S)
            * source.numel()
            / self.nbytes
        )

    def step(self) -> None:
        """A second of training, and of the driver's work."""
        self.now += 1.0
        while self.pinning.is_busy and self.registered_at is not None and self.now >= self.registered_at:
            self._may_go.set()
            time.sleep(0)


def snapshot_times(register_s_per_gb: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When `auto` snapshots in the first hour of a run, in seconds from its start."""
    gpu = ThirtyGigabytes(register_s_per_gb)
    clocks = {name: lambda: gpu.now for name in ("perf_counter", "thread_time", "monotonic", "time")}
    for module in (snapshot_maker, snapshotter, copy_thread):
        monkeypatch.setattr(module, "time", SimpleNamespace(**clocks))
    job = SmallTraining(overlap=False, device=gpu, pinning=gpu.pinning)
    gpu.nbytes = sum(tensor.nbytes for tensor in job.state())
    for _ in range(9):
        gpu.step()
        job.optimizer_step()
    cadence, times = CadenceClock(Cadence(snapshot_steps="auto"), gpu.now), []
    while gpu.now < 3600:
        gpu.step()
        job.optimizer_step()
        price = job.snapshotter.costs.snapshot_s
        if cadence.due_by_time(gpu.now, price, CommitReport(), preparing=job.snapshotter.is_preparing)[0]:
            cadence.done(gpu.now, commit=False)
            times.append(gpu.now)
            job.snapshot()
    job.close()
    return times


def test_auto_goes_by_the_price_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s per GB are no part of any snapshot's price, nor are copies into memory that is not pinned yet."""
    free, priced = (snapshot_times(seconds, monkeypatch) for seconds in (0.0, 0.1))
    assert len(free) > 9 and len(free) - len(priced) <= 1
    # The one slow copy, what the driver takes, and the step that is then under way.
    most_s = ThirtyGigabytes.UNPINNED_S + 30 * 0.1 + 1
    assert all(late - early <= most_s for early, late in zip(free, priced, strict=False)), (free, priced)
