"""Copies snapshots into arenas during training, and keeps the optimizer from changing what is being copied.

Between two optimizer steps, forward and backward only read the state. So the copy runs meanwhile, in a thread of its
own (and on a GPU on a stream of its own, behind the work already enqueued). Whatever would change the state first
passes the *pre-step barrier*: the hook that torch runs before every optimizer step, or the replay of a CUDA graph that
may contain one.

State that may change without passing the barrier is not copied during training: the caller clones small values and
buffers, and the training thread, on a GPU its stream, waits for larger foreign state (`Copy.volatile`).

On a GPU, "enqueued" is not "copied". Each hand-over therefore records a mark on the device, and the computing stream
waits for this mark before anything else is enqueued there.
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

from checkpointing.process import device as devices
from checkpointing.process.device import Device, DeviceMark

_Wait = tuple[DeviceMark, DeviceMark]


@dataclass
class Copy:
    """One copy of the state. Times are in seconds.

    Attributes:
        work: Runs in the copy thread; calls `volatile_done` and `copied` on its way.
        device: Where the state is.
        error: The exception that made the copy fail; raised in the training thread.
        copied_s: Time of the copy itself: the device's time, or the copy thread's processor time.
        blocked_s: Time that the training thread has waited for it so far, before it was settled; see `waited_s`.
        settling_s: Time that the training thread has waited for its end.
        volatile: Set when state that may change at any moment is copied, or enqueued.
        enqueued: Set when everything is copied, or enqueued.
        finished: Set when `work` has returned.
        changed: Tensors that something other than an optimizer has changed before they were copied. Counted once,
            when the device has copied them or when an optimizer is about to step, whichever is first.
        passed_barrier: An optimizer has stepped since.
        is_doubtful: A step has ended while the device was copying, and nothing was seen to pass the barrier.
        at_barrier: Called once, in the training thread, when the copy is over and an optimizer is about to step.
    """

    work: Callable[[Copy], None]
    device: Device = field(default_factory=devices.HostDevice)
    error: BaseException | None = None
    copied_s: float = 0.0
    blocked_s: float = 0.0
    settling_s: float = 0.0
    volatile: threading.Event = field(default_factory=threading.Event)
    enqueued: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    changed: int | None = None
    passed_barrier: bool = False
    is_doubtful: bool = False
    at_barrier: Callable[[], None] = lambda: None
    _count: Callable[[], int] = int
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _ready: DeviceMark | None = None
    _began: DeviceMark | None = None
    _volatile_mark: DeviceMark | None = None
    _mark: DeviceMark | None = None
    _copied: bool = False
    # Marks before and after what the device waited for: at the beginning of a step, and at the barrier.
    _waits: tuple[list[_Wait], list[_Wait]] = field(default_factory=lambda: ([], []))

    def begin(self) -> None:
        """Record, in the training thread, that what is enqueued by now comes first."""
        self._ready = self.device.mark()

    @contextlib.contextmanager
    def on_own_streams(self) -> Iterator[None]:
        """Run the body, in the copy thread, on streams of its own."""
        assert self._ready is not None
        with self.device.on_own_streams(self._ready):
            self._began = self.device.mark()
            yield

    def volatile_done(self) -> None:
        """Signal that what may change at any moment is copied, or enqueued."""
        self._volatile_mark = self.device.mark()
        self.volatile.set()

    def copied(self, count: Callable[[], int] = int) -> None:
        """Signal that everything is copied, or enqueued; return when the device has copied it.

        Args:
            count: Returns how many tensors have been changed.
        """
        self._count = count
        self._mark = self.device.mark()
        self.volatile.set()
        self.enqueued.set()
        self._mark.wait()
        seconds = self._mark.seconds_since(self._began)
        if seconds is not None:
            self.copied_s = seconds
        self._copied = True
        self.count_changed()

    def count_changed(self) -> None:
        """Count what was changed, unless that has been done."""
        with self._counting:
            if self.changed is None:
                self.changed = self._count()
                # It refers to the state.
                self._count = int

    def end_step(self) -> None:
        """Note, in the training thread, that a step has ended, and whether anything has passed the barrier in it."""
        with self._counting:
            self.is_doubtful |= not self.passed_barrier and self.changed is None

    def hold_volatile(self) -> None:
        """Have what the training thread enqueues next wait for the copy of state that may change at any moment."""
        self.volatile.wait()
        self._have_device_wait(self._volatile_mark)

    def hold(self, *, at_barrier: bool = False) -> None:
        """Have what the training thread enqueues next wait for the whole copy.

        Args:
            at_barrier: Whether an optimizer is about to step; otherwise a step begins.
        """
        self.enqueued.wait()
        self._have_device_wait(self._mark, at_barrier=at_barrier)

    def _have_device_wait(self, mark: DeviceMark | None, *, at_barrier: bool = False) -> None:
        if mark is not None:
            before = self.device.mark()
            self.device.hold(mark)
            self._waits[at_barrier].append((before, self.device.mark()))

    @property
    def is_measured(self) -> bool:
        """Whether it is known how long the copy took, and how long the device waited for it so far."""
        return self._copied and all(after.is_passed for waits in self._waits for _, after in waits)

    def await_measured(self) -> None:
        """Wait for that, on the host, after the copy was handed over."""
        for _, after in (*self._waits[0], *self._waits[1]):
            after.wait()

    def device_waited_s(self, *, at_barrier: bool) -> float:
        """Return the seconds for which the device computed nothing because it waited for the copy, as far as known.

        The host does not wait then, but the steps that it enqueues end later by so much.

        Args:
            at_barrier: Whether to count the waits of optimizers, or those at the beginning of a step.
        """
        waits = self._waits[at_barrier]
        return sum(after.seconds_since(before) or 0.0 for before, after in waits if after.is_passed)

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for it, as far as they are known.

        Host and device may both wait for the end of the copy, which counts once.
        """
        device_s = self.device_waited_s(at_barrier=False) + self.device_waited_s(at_barrier=True)
        return self.blocked_s + max(self.settling_s, device_s)


class CopyThread:
    """The thread that copies, and the barrier before optimizer steps. The training thread calls all methods.

    Args:
        on_optimizer_step: Called whenever an optimizer is about to step.
        waiting: Returns a context in which the training thread waits at the barrier.
    """

    def __init__(
        self,
        on_optimizer_step: Callable[[], None] = lambda: None,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._on_optimizer_step, self._waiting = on_optimizer_step, waiting
        self._copy: Copy | None = None
        self._work: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hook: Any = register_optimizer_step_pre_hook(self._before_step)
        self._remove_replay_hook = devices.before_replays(self._before_change)

    def submit(
        self, work: Callable[[Copy], None], device: Device | None = None, at_barrier: Callable[[], None] = lambda: None
    ) -> Copy:
        """Start a copy; the previous one must be settled. For `at_barrier` see `Copy`."""
        assert self._copy is None or self._copy.finished.is_set()
        copy = self._copy = Copy(work, device or devices.HostDevice(), at_barrier=at_barrier)
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
        self.pre_step_barrier()

    # The same mark as `torch.compiler.disable` sets, without importing the compiler: compiled steps wait here like any
    # others.
    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    def pre_step_barrier(self) -> None:
        """Return when an optimizer may change the state.

        Raises:
            Exception: Whatever made the snapshot fail.
        """
        self._on_optimizer_step()
        self._before_change()

    def _before_change(self) -> None:
        # Also runs before the replay of a graph, which may contain a forward pass or an optimizer step:
        # `on_optimizer_step` is for optimizers only.
        copy = self._copy
        if copy is None:
            return
        if not copy.passed_barrier:
            began = time.perf_counter()
            # On a GPU the device waits, not the host.
            with self._waiting() if not copy.enqueued.is_set() else contextlib.nullcontext():
                copy.hold(at_barrier=True)
            copy.at_barrier()
            copy.blocked_s += time.perf_counter() - began
            copy.count_changed()
            copy.passed_barrier = True
        if copy.error is not None:
            self.settle()

    def settle(self) -> Copy | None:
        """Wait until the last copy has been handed over entirely; return it.

        Raises:
            Exception: Whatever made the snapshot fail; once.
        """
        copy = self._copy
        if copy is None:
            return None
        began = time.perf_counter()
        copy.finished.wait()
        copy.settling_s += time.perf_counter() - began
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
                with copy.on_own_streams():
                    copy.work(copy)
            except BaseException as error:
                copy.error = error
            # What is kept until it is measured must not keep the state.
            copy.work = _nothing
            copy.volatile.set()
            copy.enqueued.set()
            copy.finished.set()


def _nothing(copy: Copy) -> None:
    """Do nothing."""
