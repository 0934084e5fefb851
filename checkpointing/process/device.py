"""The accelerator, through `torch.accelerator`, `torch.Stream` and `torch.Event`: one path for CUDA, ROCm and XPU.

Everything that depends on the kind of device is here: streams and events, copies to the host, pinned memory,
generators, memory figures and names. Other modules of `checkpointing` and `runner.training` do not use `torch.cuda`.

Work on a device runs later than the host asks for it. A copy that was *enqueued* has not read anything yet; what the
host enqueues next on another stream may run first. Only marks give an order: `mark` records a point in the work of the
current streams, `hold` makes the current streams wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

# Memory is pinned in pieces that end at multiples of this in an arena; no copy crosses such a line.
CHUNK_BYTES = 256 * 1024 * 1024
# Interval between two queries of a device that has not reached a mark yet.
_QUERY_EVERY_S = 0.0005


class DeviceMark(Protocol):
    """A point in the work that was enqueued on a device."""

    @property
    def is_passed(self) -> bool:
        """Whether the device has passed it."""

    def wait(self) -> None:
        """Wait, on the host, until the device has passed it."""

    def seconds_since(self, earlier: Any) -> float | None:
        """Return the device time between two marks that have been passed; None where the device has no clock."""


class Device(Protocol):
    """A device that holds training state, for copying it to the host.

    Attributes:
        is_asynchronous: Whether work on the device runs later than it is asked for.
    """

    is_asynchronous: bool

    def mark(self) -> DeviceMark:
        """Return a mark behind what is enqueued on the current streams of this thread."""

    def hold(self, mark: DeviceMark) -> None:
        """Have the current streams of this thread wait for a mark; the host does not wait."""

    def on_own_streams(self, mark: DeviceMark) -> contextlib.AbstractContextManager[None]:
        """Return a context whose work runs on streams of its own, behind a mark."""

    def copy(self, buffer: memoryview, offset: int, source: torch.Tensor) -> None:
        """Copy a flat uint8 tensor into host memory, in the order of this thread's current streams."""

    def copy_runs(self, buffer: memoryview, offset: int, source: torch.Tensor, strides: Sequence[int]) -> None:
        """Copy runs of bytes likewise; see `file_images.Extent` for their places."""


class _Past:
    """A mark that is always passed: the host's own work is done when it is asked for."""

    is_passed = True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Any) -> float | None:
        return None


class HostDevice:
    """The CPU's memory, which is copied at once."""

    is_asynchronous = False

    def mark(self) -> DeviceMark:
        """Return a mark that is passed."""
        return _Past()

    def hold(self, mark: DeviceMark) -> None:
        """Return at once: the host's own work is in order."""

    def on_own_streams(self, mark: DeviceMark) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def copy(self, buffer: memoryview, offset: int, source: torch.Tensor) -> None:
        """Copy at once."""
        # Not `copy_`: that would wake torch's thread pool, which belongs to training.
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        ctypes.memmove(address + offset, source.data_ptr(), source.numel())

    def copy_runs(self, buffer: memoryview, offset: int, source: torch.Tensor, strides: Sequence[int]) -> None:
        """Copy at once."""
        # numpy's copies stay in this thread, for the same reason.
        target = np.ndarray(source.shape, np.uint8, buffer, offset, (*strides, 1))
        np.copyto(target, source.numpy())


class _Events:
    """An event on each device that a process uses."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    @property
    def is_passed(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        # Not `synchronize`, which keeps a core busy that training needs.
        while not self.is_passed:
            time.sleep(_QUERY_EVERY_S)

    def hold(self, devices: Sequence[torch.device]) -> None:
        for event, device in zip(self._events, devices, strict=True):
            torch.accelerator.current_stream(device).wait_event(event)

    def seconds_since(self, earlier: _Events) -> float | None:
        try:
            pairs = zip(earlier._events, self._events, strict=True)
            return max(float(first.elapsed_time(last)) for first, last in pairs) / 1e3
        except (RuntimeError, NotImplementedError):
            return None  # Some back ends' events have no time.


class Accelerator:
    """One or several accelerators of a process, of one kind. Tensors on the host are copied at once."""

    is_asynchronous = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._streams: list[Any] = []
        self._host = HostDevice()

    def mark(self) -> _Events:
        """Return an event on each accelerator's current stream."""
        events = []
        for device in self._devices:
            event = torch.Event(device=device, enable_timing=True)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
        return _Events(events)

    def hold(self, mark: DeviceMark) -> None:
        """Have the current streams wait for a mark."""
        assert isinstance(mark, _Events)
        mark.hold(self._devices)

    @contextlib.contextmanager
    def on_own_streams(self, mark: DeviceMark) -> Iterator[None]:
        """Run the body on streams of its own, behind a mark."""
        if not self._streams:
            self._streams = [torch.Stream(device=device) for device in self._devices]
        before = [torch.accelerator.current_stream(device) for device in self._devices]
        index = torch.accelerator.current_device_index()
        try:
            for stream in reversed(self._streams):
                torch.accelerator.set_stream(stream)
            self.hold(mark)
            yield
        finally:
            for stream in before:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(index)

    def copy(self, buffer: memoryview, offset: int, source: torch.Tensor) -> None:
        """Enqueue a copy on the current stream, cut at multiples of `CHUNK_BYTES`."""
        if source.device.type == "cpu":
            self._host.copy(buffer, offset, source)
            return
        for first, last in cut(offset, source.numel()):
            target = torch.frombuffer(buffer, dtype=torch.uint8, offset=offset + first, count=last - first)
            target.copy_(source[first:last], non_blocking=True)

    def copy_runs(self, buffer: memoryview, offset: int, source: torch.Tensor, strides: Sequence[int]) -> None:
        """Copy behind what is enqueued on the current stream; return when that is done."""
        # torch gathers the runs in memory of its own, and spreads them on the host.
        if source.device.type == "cpu":
            self._host.copy_runs(buffer, offset, source, strides)
            return
        target = torch.frombuffer(buffer, dtype=torch.uint8, offset=offset)
        target.as_strided(source.shape, (*strides, 1)).copy_(source)


def cut(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a copy to `offset` of an arena, none of which crosses a multiple of `CHUNK_BYTES`."""
    first = 0
    while first < nbytes:
        last = min(nbytes, ((offset + first) // CHUNK_BYTES + 1) * CHUNK_BYTES - offset)
        yield first, last
        first = last


def of(tensors: Iterable[torch.Tensor]) -> Device:
    """Return the accelerators that hold these tensors, or the host where none is on one."""
    found = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return _accelerator(tuple(found)) if found else HostDevice()


@functools.cache
def _accelerator(devices: tuple[torch.device, ...]) -> Accelerator:
    """Return the one object for these devices, which keeps their streams."""
    return Accelerator(devices)


_replay_hooks: list[Callable[[], None]] = []


def before_replays(callback: Callable[[], None]) -> Callable[[], None]:
    """Call a function before any CUDA graph (XPU graph, ...) is replayed here; return what removes it.

    A replay runs no hook of an optimizer that was recorded in it, and changes tensors without counting their versions.
    """
    kinds = (("cuda", "CUDAGraph"), ("xpu", "XPUGraph"), ("accelerator", "Graph"))
    for module, name in kinds:
        graph = getattr(getattr(torch, module, None), name, None)
        if graph is not None and "replay" in vars(graph) and not hasattr(graph.replay, _WRAPPED):
            graph.replay = _hooked(graph.replay)
    _replay_hooks.append(callback)
    return functools.partial(_replay_hooks.remove, callback)


def announce_replay() -> None:
    """Call the callbacks; for graphs of a class that `before_replays` does not know."""
    for callback in list(_replay_hooks):
        callback()


def is_capturing() -> bool:
    """Return whether this thread's work on a GPU is being recorded into a CUDA graph, instead of being done."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


_WRAPPED = "_checkpointing_wrapped"


def _hooked(replay: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replay)
    def announce_and_replay(*args: Any, **kwargs: Any) -> Any:
        announce_replay()
        return replay(*args, **kwargs)

    setattr(announce_and_replay, _WRAPPED, True)
    return announce_and_replay


# -- the process's accelerator ---------------------------------------------------------------------------------------


def kind() -> str | None:
    """Return the accelerator's type ("cuda", which is ROCm's name, too; "xpu", ...); None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else None


def check_fork() -> None:
    """Check that the accelerator can be used in this process.

    Raises:
        RuntimeError: The accelerator's runtime was started in a process that this one was forked from.
    """
    found = torch.accelerator.current_accelerator()
    is_lost = getattr(torch.get_device_module(found), "_is_in_bad_fork", None) if found is not None else None
    if found is not None and is_lost is not None and is_lost():
        # torch's own message, which it would raise only when the model is moved.
        raise RuntimeError(f"Cannot re-initialize {found.type.upper()} in forked subprocess")


def generator_states(world_size: int) -> dict[str, Any]:
    """Return the accelerators' generator states, named and shaped as the Hugging Face Trainer saves them."""
    if (name := kind()) is None:
        return {}
    module = torch.get_device_module(name)
    return {name: module.get_rng_state_all() if world_size > 1 else module.get_rng_state()}


def generator_words() -> list[memoryview]:
    """Return the state of the current accelerator's generator, which torch keeps on the host, as bytes."""
    return [memoryview(torch.get_device_module(kind() or "cpu").get_rng_state().numpy())]


def default_generators() -> list[torch.Generator]:
    """Return the generators that torch draws from where it is given none."""
    module = torch.get_device_module(kind() or "cpu")
    return [torch.default_generator, *getattr(module, "default_generators", ())]


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set the accelerators' generators to what `generator_states` returned; does nothing where there are none."""
    name = kind()
    if name is None or name not in states:
        return
    module, state = torch.get_device_module(name), states[name]
    if isinstance(state, torch.Tensor):
        module.set_rng_state(state)
        return
    # Each rank uses one device; a state of more or fewer devices comes from another machine.
    for index, device_state in enumerate(state[: torch.accelerator.device_count()]):
        module.set_rng_state(device_state, index)


def collective_backend() -> str:
    """Return the process group's back end for tensors on the model's device."""
    name = kind()
    return dist.get_default_backend_for_device(name) if name is not None else "gloo"


def name_of() -> str | None:
    """Return the accelerator's name, as its vendor calls it."""
    ask = getattr(torch.get_device_module(kind() or "cpu"), "get_device_name", None)
    return str(ask()) if ask is not None else None


def capability() -> tuple[int, int] | None:
    """Return CUDA's compute capability; None for other accelerators, and without one."""
    return torch.cuda.get_device_capability() if kind() == "cuda" else None


def peak_memory_bytes() -> int:
    """Return the most memory that this process has used so far, in bytes: on its accelerator, or else on its host."""
    if kind() is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # `torch.accelerator` has this for all devices since torch 2.9.
    module = torch.accelerator if hasattr(torch.accelerator, "max_memory_allocated") else torch.get_device_module()
    return int(module.max_memory_allocated())


def utilization_percent() -> float | None:
    """Return how busy the accelerator is, in percent; None where that is unknown."""
    try:
        return float(torch.cuda.utilization()) if kind() == "cuda" else None
    except Exception:
        return None  # nvidia-ml-py is missing, or the driver refuses, each with errors of its own


class LateTensor:
    """A small tensor that the device has yet to compute; reading it waits for nothing enqueued later.

    Args:
        value: Any tensor; on the host it is taken by reference.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._mark: DeviceMark | None = None
        self._value = value.detach()
        if value.device.type != "cpu":
            # Kept until it is read: not every device's memory outlives a tensor that a copy was asked of.
            self._source = self._value
            # Into other memory the copy would wait for the device.
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(self._source, non_blocking=True)
            self._mark = _accelerator((value.device,)).mark()

    @property
    def is_at_hand(self) -> bool:
        """Whether it was on the host from the beginning."""
        return self._mark is None

    @property
    def has_arrived(self) -> bool:
        """Whether reading it does not wait for the device."""
        return self._mark is None or self._mark.is_passed

    def on_host(self) -> torch.Tensor:
        """Return the tensor on the host; waits until the device has computed it."""
        if self._mark is not None:
            self._mark.wait()
        return self._value


class Later:
    """A number, or a tensor of one, that the device has yet to compute; reading it waits for nothing enqueued later."""

    def __init__(self, value: torch.Tensor | float) -> None:
        is_on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
        self._value = LateTensor(value.reshape(())) if is_on_device else float(value)  # type: ignore[union-attr]

    @property
    def is_at_hand(self) -> bool:
        """Whether reading the number does not wait for the device."""
        return isinstance(self._value, float)

    @property
    def has_arrived(self) -> bool:
        """Whether reading the number does not wait for the device now."""
        return isinstance(self._value, float) or self._value.has_arrived

    def __float__(self) -> float:
        return self._value if isinstance(self._value, float) else float(self._value.on_host())


# -- pinned memory ---------------------------------------------------------------------------------------------------


def can_pin() -> bool:
    """Return whether host memory can be registered with the accelerator's driver (CUDA and ROCm)."""
    return kind() == "cuda"


def register(address: int, nbytes: int) -> bool:
    """Pin host memory that torch has not allocated; return whether the driver did."""
    return _call_runtime("cudaHostRegister", address, nbytes, 0)


def unregister(address: int) -> None:
    """Undo `register`."""
    _call_runtime("cudaHostUnregister", address)


def _call_runtime(function: str, *arguments: int) -> bool:
    cudart: Any = torch.cuda.cudart
    if int(getattr(cudart(), function)(*arguments)) == 0:
        return True
    # The runtime keeps the error: this thread's next kernel would raise it, as "out of memory".
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").neg()
    return False
