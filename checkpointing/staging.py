"""Copies a snapshot into an arena beside training, and keeps the optimizer from changing what is being copied.

Between two optimizer steps, forward and backward only read the state. So the copy runs beside them, in a thread of its
own (and on a GPU on a stream of its own, behind the work already enqueued), and whatever would change the state first
passes `gate`: the hook that torch runs before every optimizer's step.

What may change without passing there is not copied beside training: small values and buffers are cloned by the caller,
and the training thread waits for larger foreign state (`Copy.volatile`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


@dataclass
class Copy:
    """A snapshot in the making. Times are seconds.

    Attributes:
        work: runs in the helper thread; calls `volatile_done` and `copied` on its way.
        error: what made it fail; raised in the training thread.
        copied_s: processor time of the copy (on a GPU: its wall time).
        blocked_s: what the training thread has waited for it so far.
    """

    work: Callable[[Copy], None]
    error: BaseException | None = None
    copied_s: float = 0.0
    blocked_s: float = 0.0
    volatile: threading.Event = field(default_factory=threading.Event)
    enqueued: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    ready: Any = None
    on_device: Any = None

    def volatile_done(self) -> None:
        """What may change at any moment is in the arena."""
        self.volatile.set()

    def copied(self) -> None:
        """Everything is copied, or on its way in the side stream: the optimizer may go on."""
        if self.ready is not None:
            self.on_device = torch.cuda.Event()
            self.on_device.record(torch.cuda.current_stream())
        self.volatile.set()
        self.enqueued.set()
        if self.on_device is not None:
            self.on_device.synchronize()


class Stager:
    """One per rank. `submit`, `gate` and `settle` are called by the training thread."""

    def __init__(self, on_gate: Callable[[], None] = lambda: None) -> None:
        """`on_gate` is told whenever an optimizer is about to step."""
        self._on_gate = on_gate
        self._copy: Copy | None = None
        self._work: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hook: Any = register_optimizer_step_pre_hook(lambda *_: self.gate())
        self._stream: Any = None

    def submit(self, work: Callable[[Copy], None]) -> Copy:
        """Start copying; the one before must be settled."""
        assert self._copy is None or self._copy.finished.is_set()
        copy = Copy(work)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            copy.ready = torch.cuda.Event()
            copy.ready.record(torch.cuda.current_stream())
            if self._stream is None:
                self._stream = torch.cuda.Stream()
        self._copy = copy
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
            self._thread.start()
        self._work.put(copy)
        return copy

    @property
    def current(self) -> Copy | None:
        """The copy that is not settled yet."""
        return self._copy

    def gate(self) -> None:
        """Return when the state may change.

        Raises:
            Exception: what made the snapshot fail, if it did.
        """
        self._on_gate()
        copy = self._copy
        if copy is None:
            return
        with _timed(copy):
            copy.enqueued.wait()
        if copy.on_device is not None:
            # The device waits, the host does not.
            torch.cuda.current_stream().wait_event(copy.on_device)
        if copy.error is not None:
            self.settle()

    def settle(self) -> Copy | None:
        """Wait until the last copy has been handed over entirely; returns it.

        Raises:
            Exception: what made the snapshot fail, if it did; once.
        """
        copy = self._copy
        if copy is None:
            return None
        with _timed(copy):
            copy.finished.wait()
        self._copy = None
        if copy.error is not None:
            raise copy.error
        return copy

    def close(self) -> None:
        """End the thread; nothing may be in flight."""
        self._hook.remove()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (copy := self._work.get()) is not None:
            try:
                with self._on_side_stream(copy):
                    copy.work(copy)
            except BaseException as error:
                copy.error = error
            copy.volatile.set()
            copy.enqueued.set()
            copy.finished.set()

    @contextlib.contextmanager
    def _on_side_stream(self, copy: Copy) -> Iterator[None]:
        if copy.ready is None:
            yield
            return
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copy.ready)
            yield


@contextlib.contextmanager
def _timed(copy: Copy) -> Iterator[None]:
    began = time.perf_counter()
    yield
    copy.blocked_s += time.perf_counter() - began
