"""Copies a snapshot into an arena beside training, and keeps the optimizer from changing what is being copied.

Between two optimizer steps, forward and backward only read the state. So the copy runs beside them, in a thread of its
own (and on a GPU on a stream of its own, behind the work already enqueued), and whatever would change the state first
passes `gate`: the hook that torch runs before every optimizer's step, or the replay of a CUDA graph that may hold one.

What may change without passing there is not copied beside training: small values and buffers are cloned by the caller,
and the training thread, on a GPU its stream, waits for larger foreign state (`Copy.volatile`).

On a GPU, "enqueued" is not "copied". Each hand-over therefore records a mark on the device, for which the stream that
computes waits before anything else is enqueued there.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpointing.rank import device as devices
from checkpointing.rank.device import Device, Mark


@dataclass
class Copy:
    """A snapshot in the making. Times are seconds.

    Attributes:
        work: runs in the helper thread; calls `volatile_done` and `copied` on its way.
        device: where the state is.
        error: what made it fail; raised in the training thread.
        copied_s: of the copy: the device's time, or the helper thread's processor time.
        blocked_s: what the training thread has waited for it so far.
        changed: tensors that something else than an optimizer has changed before they were copied; counted once, when
            the device has copied them or when an optimizer is about to step, whichever is first.
        passed_gate: an optimizer has stepped since.
        is_doubtful: a step has ended while the device was copying, and nothing was seen to pass the gate.
    """

    work: Callable[[Copy], None]
    device: Device = field(default_factory=devices.Host)
    error: BaseException | None = None
    copied_s: float = 0.0
    blocked_s: float = 0.0
    volatile: threading.Event = field(default_factory=threading.Event)
    enqueued: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    changed: int | None = None
    passed_gate: bool = False
    is_doubtful: bool = False
    _count: Callable[[], int] = int
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _ready: Mark | None = None
    _began: Mark | None = None
    _volatile_mark: Mark | None = None
    _mark: Mark | None = None

    def begin(self) -> None:
        """In the training thread: what is enqueued by now comes first."""
        self._ready = self.device.mark()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """In the helper thread: on streams of its own."""
        assert self._ready is not None
        with self.device.beside(self._ready):
            self._began = self.device.mark()
            yield

    def volatile_done(self) -> None:
        """What may change at any moment is copied, or on its way."""
        self._volatile_mark = self.device.mark()
        self.volatile.set()

    def copied(self, count: Callable[[], int] = int) -> None:
        """Everything is copied, or on its way; returns when the device has copied it.

        Args:
            count: tells how many tensors have been changed.
        """
        self._count = count
        self._mark = self.device.mark()
        self.volatile.set()
        self.enqueued.set()
        self._mark.wait()
        seconds = self._mark.seconds_since(self._began)
        if seconds is not None:
            self.copied_s = seconds
        self.count_changed()

    def count_changed(self) -> None:
        """Count what was changed, unless that has been done."""
        with self._counting:
            if self.changed is None:
                self.changed = self._count()

    def end_step(self) -> None:
        """In the training thread: a step has ended. Whatever has changed the state should have passed the gate."""
        with self._counting:
            self.is_doubtful |= not self.passed_gate and self.changed is None

    def hold_volatile(self) -> None:
        """In the training thread: what may change at any moment may be changed by what is enqueued after this."""
        self.volatile.wait()
        if self._volatile_mark is not None:
            self.device.hold(self._volatile_mark)

    def hold(self) -> None:
        """In the training thread: all of the state may be changed by what is enqueued after this."""
        self.enqueued.wait()
        if self._mark is not None:
            self.device.hold(self._mark)


class Stager:
    """One per rank. `submit`, `gate` and `settle` are called by the training thread."""

    def __init__(self, on_gate: Callable[[], None] = lambda: None) -> None:
        """`on_gate` is told whenever an optimizer is about to step."""
        self._on_gate = on_gate
        self._copy: Copy | None = None
        self._work: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hook: Any = register_optimizer_step_pre_hook(self._before_step)
        self._remove_replay_hook = devices.before_replays(self._before_change)

    def submit(self, work: Callable[[Copy], None], device: Device | None = None) -> Copy:
        """Start copying; the one before must be settled."""
        assert self._copy is None or self._copy.finished.is_set()
        copy = self._copy = Copy(work, device or devices.Host())
        copy.begin()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
            self._thread.start()
        self._work.put(copy)
        return copy

    @property
    def current(self) -> Copy | None:
        """The copy that is not settled yet."""
        return self._copy

    def _before_step(self, *_: Any) -> None:
        self.gate()

    # As `torch.compiler.disable` marks what is not to be compiled, without importing the compiler: compiled steps wait
    # here like any others.
    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    def gate(self) -> None:
        """Return when the state may change.

        Raises:
            Exception: what made the snapshot fail, if it did.
        """
        self._on_gate()
        self._before_change()

    def _before_change(self) -> None:
        # Also before a graph's replay, which may hold a forward pass as well as an optimizer's step: `on_gate` is for
        # optimizers alone.
        copy = self._copy
        if copy is None:
            return
        if not copy.passed_gate:
            with _timed(copy):
                # The device waits, the host does not.
                copy.hold()
            copy.count_changed()
            copy.passed_gate = True
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
        self._remove_replay_hook()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (copy := self._work.get()) is not None:
            try:
                with copy.beside():
                    copy.work(copy)
            except BaseException as error:
                copy.error = error
            copy.volatile.set()
            copy.enqueued.set()
            copy.finished.set()


@contextlib.contextmanager
def _timed(copy: Copy) -> Iterator[None]:
    began = time.perf_counter()
    yield
    copy.blocked_s += time.perf_counter() - began
