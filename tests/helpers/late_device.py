"""A device whose copies run late: when somebody waits for them, or at a moment that the test chooses.

Its tensors are the host's, and what training computes runs at once: the worst that a GPU may do with a copy that was
only enqueued.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from checkpointing.process.device import DeviceMark, HostDevice


class LateMark:
    def __init__(self, device: LateDevice, position: int) -> None:
        self._device, self._position = device, position

    @property
    def is_passed(self) -> bool:
        return self._device.num_run >= self._position

    def wait(self) -> None:
        self._device.wait(self._position)

    def hold(self) -> None:
        self._device.run(self._position)

    def seconds_since(self, earlier: Any) -> float | None:
        return 0.0


class LateDevice:
    is_asynchronous = True

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: list[Callable[[], None]] = []
        self._num_run = 0
        self._host = HostDevice()
        # Waiting for a copy on the host runs it at once; otherwise it blocks until the test runs it.
        self.is_hurried = False

    @property
    def num_run(self) -> int:
        return self._num_run

    @property
    def num_waiting(self) -> int:
        return len(self._copies) - self._num_run

    def mark(self) -> DeviceMark:
        with self._changed:
            return LateMark(self, len(self._copies))

    def hold(self, mark: DeviceMark) -> None:
        assert isinstance(mark, LateMark)
        mark.hold()

    @contextlib.contextmanager
    def on_own_streams(self, mark: DeviceMark) -> Iterator[None]:
        yield

    def copy(self, buffer: memoryview, offset: int, source: torch.Tensor) -> None:
        with self._changed:
            self._copies.append(lambda: self._host.copy(buffer, offset, source))

    def copy_runs(self, buffer: memoryview, offset: int, source: torch.Tensor, strides: Sequence[int]) -> None:
        with self._changed:
            self._copies.append(lambda: self._host.copy_runs(buffer, offset, source, strides))

    def run(self, position: int) -> None:
        """Run the copies before a position."""
        with self._changed:
            while self._num_run < position:
                self._copies[self._num_run]()
                self._num_run += 1
            self._changed.notify_all()

    def run_some(self, number: int) -> None:
        """Run so many of the copies that wait."""
        self.run(min(self._num_run + number, len(self._copies)))

    def wait(self, position: int) -> None:
        """Wait, on the host, until the copies before a position have run."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_hurried or self._num_run >= position)
        self.run(position)

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Within this context, waiting does not block on the test."""
        with self._changed:
            self.is_hurried = True
            self._changed.notify_all()
        yield
        self.is_hurried = False
