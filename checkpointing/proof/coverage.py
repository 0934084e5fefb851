"""Finds what training changes and no checkpoint holds, by comparing what can be reached from it.

No list of attributes is ever complete. So everything that can be reached from model, data, callbacks, loss, and the
script's frames is looked at when training begins, and again at its saves.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import time
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from checkpointing.data.generators import GENERATORS
from checkpointing.files import sharding
from checkpointing.process.carried import LoopVariables, carried_by, globals_of, named_in_call
from checkpointing.process.reachable import (
    MAX_ITEMS,
    SIMPLE,
    Reached,
    attributes_of,
    is_data,
    is_own_module,
    reachable,
    stored_by,
)
from checkpointing.state.samples import spread_words

# What is searched, by name, and which of these names the script's own code keeps.
Roots = Callable[[int | None], tuple[Mapping[str, object], Collection[str]]]
_WORDS = 8
# Containers, and what stands somewhere in them.
_KEEPING = (list, tuple, dict, set, deque, Iterator)
# Saves at which it compares: the first ones, since what is made late is found there, and then fewer and fewer.
_FIRST_SAVES = 8
# Items of a state dict, and levels of nested containers, that are looked at.
_MOST_LEAVES, _DEPTH = 1000, 4
# Reading all tensors of a large frozen module would take seconds.
_TENSORS_OF_A_MODULE = 16
_MOST_TEXT = 200
_NAMES_IN_A_MESSAGE = 8


class Coverage:
    """What one training changes besides what is saved.

    Args:
        roots: Returns what is searched at a step; None before the first one.
        covered: Returns the ids of modules and tensors that a checkpoint holds; what else they hold is searched.
        without: Returns the ids of objects that are left out, with what they hold.
        partly: Returns, by the ids of objects, the names of their attributes that a checkpoint holds.
    """

    def __init__(
        self,
        roots: Roots,
        covered: Callable[[], set[int]],
        without: Callable[[], set[int]],
        partly: Callable[[], Mapping[int, Collection[str]]] = dict,
    ) -> None:
        self._roots, self._covered, self._without, self._partly = roots, covered, without, partly
        self._before: dict[str, int] | None = None
        self._num_saves = 0
        self._named = set[str]()

    def begin(self) -> None:
        """Note how everything is before the first step."""
        self._before, self._num_saves, self._named = self._digests(None), 0, set()

    def at_save(self, step: int) -> list[str] | None:
        """Compare at a save: the first ones, the sixteenth, the thirty-second, and so on.

        Args:
            step: Its step.

        Returns:
            The paths of what has changed, which no earlier call has returned; None where nothing was compared.
        """
        self._num_saves += 1
        if self._num_saves > _FIRST_SAVES and self._num_saves & (self._num_saves - 1):
            return None
        found = [path for path in self.changed(step) if _short(path) not in self._named]
        self._named.update(map(_short, found))
        return found

    def changed(self, step: int) -> list[str]:
        """Return the paths of what has changed since `begin`, or was not there then."""
        before = self._before
        if before is None:
            return []
        now = self._digests(step)
        self._before = {**now, **before}
        return [path for path in sorted(now) if before.get(path) != now[path]]

    def _digests(self, step: int | None) -> dict[str, int]:
        covered = self._covered()
        roots, own = self._roots(step)
        found: dict[str, int] = {}
        for reached in reachable(roots, self._without(), own_roots=own, partly=self._partly()):
            if id(reached.value) in covered and not isinstance(reached.value, torch.nn.Module):
                continue
            if isinstance(reached.value, torch.nn.Module):
                found.update(_of_module(reached.path, reached.value, covered))
            elif (digest := _digest(reached)) is not None:
                found[reached.path] = digest
        return found


def held_by(owner: object, state: object) -> set[str]:
    """Return the attributes of an object that its state holds: by their names, or their values.

    Args:
        owner: The object.
        state: What its `state_dict` returns, say.
    """
    names, values = set[str](), list[Any]()
    waiting: list[tuple[Any, int]] = [(state, 2)] if isinstance(state, (dict, list, tuple)) else []
    while waiting:
        found, depth = waiting.pop()
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for name, value in items:
            names.add(str(name))
            values.append(value)
            if depth and isinstance(value, (dict, list, tuple)) and len(value) <= MAX_ITEMS:
                waiting.append((value, depth - 1))
    return {
        name
        for name, value in attributes_of(owner).items()
        if name in names or name.lstrip("_") in names or any(_is_same(value, held) for held in values)
    }


def _is_same(value: object, held: object) -> bool:
    if value is held and not isinstance(value, (int, float, str, type(None))):
        return True
    if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
        return value.shape == held.shape and value.device == held.device and bool(torch.equal(value, held))
    # That two small numbers are equal says nothing.
    is_telling = isinstance(value, (int, float, str)) and value not in (0, 1, -1, "")
    return is_telling and type(value) is type(held) and value == held


def _short(path: str) -> str:
    """Return a path with all items of a container as one."""
    return re.sub(r"(\[\d+\])+$", "[…]", path)


def listed(names: list[str]) -> str:
    """Return names for a message, the first few of many; the items of a container are one."""
    names = list(dict.fromkeys(map(_short, names)))
    rest = len(names) - _NAMES_IN_A_MESSAGE
    return ", ".join(names[:_NAMES_IN_A_MESSAGE]) + (f", and {rest} more" if rest > 0 else "")


def _digest(reached: Reached) -> int | None:
    """Return the digest of what an object holds itself; None for what is not compared."""
    value = reached.value
    if isinstance(value, GENERATORS):
        return None  # They are saved.
    # What a library keeps deeper inside, or as its own business, comes and goes.
    own = reached.is_own or ("._" not in reached.path and reached.path.count(".") == 1)
    if isinstance(value, torch.Tensor):
        return _of_tensors([value]) if own else None
    if isinstance(value, (np.ndarray, np.generic)):
        return _of_array(np.asarray(value)) if own and value.dtype.kind in "biufc" else None
    if reached.is_own:
        return _of_own(value)
    return _of_state(value) if own else None


def _of_module(path: str, module: torch.nn.Module, covered: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield path and digest of a module's tensors that no checkpoint holds, and of each number that it has besides."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    kind: Any = type(module)
    # What the script's own code sets is looked at by its name.
    stored, _ = stored_by(kind)
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training" or name in stored:
            continue
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (int, float)):
            yield f"{path}.{name}", zlib.crc32(repr(value).encode())
    tensors = [tensor for tensor in tensors if id(tensor) not in covered]
    if tensors:
        yield path, _of_tensors(tensors)


def _of_own(value: Any) -> int | None:
    """Return the digest of an object that the script's code keeps."""
    if isinstance(value, SIMPLE):
        return zlib.crc32(repr(value)[:_MOST_TEXT].encode())
    if isinstance(value, Iterator):
        return _of_iterator(value)
    if not isinstance(value, (list, tuple, dict, set, deque)):
        # That there is something else now, or that it has another state.
        state = _of_state(value)
        return zlib.crc32(type(value).__qualname__.encode(), state or 0)
    digest = zlib.crc32(f"{type(value).__qualname__}{len(value)}".encode())
    if len(value) > MAX_ITEMS:
        # The search goes into shorter ones.
        items = itertools.islice(value.values() if isinstance(value, dict) else value, 0, None, len(value) // MAX_ITEMS)
        for item in items:
            digest = _of_nested(item, digest, _DEPTH, [_MOST_LEAVES])
    return digest


def _of_state(value: Any) -> int | None:
    """Return the digest of what an object's `state_dict` returns; None if it has none.

    What has one is meant to be saved: a further scheduler, say.
    """
    if isinstance(value, (type, torch.nn.Module)) or not callable(getattr(type(value), "state_dict", None)):
        return None
    try:
        return _of_nested(value.state_dict(), 1, _DEPTH, [_MOST_LEAVES])
    except Exception:  # of any kind: it is not ours to call
        return None


def _of_nested(value: Any, digest: int, depth: int, left: list[int]) -> int:
    """Continue a digest with a value; `left` holds how many more are looked at."""
    left[0] -= 1
    if isinstance(value, torch.Tensor):
        return zlib.crc32(_of_tensors([value]).to_bytes(4, "little"), digest)
    if isinstance(value, np.ndarray):
        return zlib.crc32(_of_array(value).to_bytes(4, "little"), digest)
    if isinstance(value, SIMPLE):
        return zlib.crc32(repr(value)[:_MOST_TEXT].encode(), digest)
    if isinstance(value, (list, tuple, dict, deque)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            if left[0] <= 0:
                break
            digest = _of_nested(item, digest, depth - 1, left)
    return digest


def _of_iterator(value: Iterator[Any]) -> int | None:
    """Return the digest of how far an iterator of the script is; None for one that is followed, or of another kind."""
    if isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        inside = _locals_of(value.gi_frame)
        kept = [(name, one) for name, one in inside if isinstance(one, (int, float, str))]
        is_own = is_own_module(value.gi_frame.f_globals.get("__name__", ""))
        if not is_own or any(_is_followed(one) for _, one in inside):
            return None
        return zlib.crc32(repr((value.gi_frame.f_lasti, kept))[:_MOST_TEXT].encode())
    if isinstance(value, (itertools.count, itertools.cycle)):
        return zlib.crc32(repr(value.__reduce__())[-_MOST_TEXT:].encode())
    number = getattr(value, "_num_yielded", None)
    return zlib.crc32(repr(number).encode()) if isinstance(number, int) else None


def _is_followed(value: object) -> bool:
    frame = value.gi_frame if isinstance(value, types.GeneratorType) else None
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("checkpointing.")


def _of_array(array: np.ndarray[Any, Any]) -> int:
    flat = array.reshape(-1)
    return zlib.crc32(repr((array.shape, flat[:: max(len(flat) // 64, 1)].tolist())).encode())


def _of_tensors(tensors: list[torch.Tensor]) -> int:
    half = _TENSORS_OF_A_MODULE // 2
    chosen = tensors if len(tensors) <= 2 * half else [*tensors[:half], *tensors[-half:]]
    checksum = len(tensors)
    for tensor in chosen:
        if torch.nn.parameter.is_lazy(tensor):
            continue
        own: Any = tensor._local_tensor if sharding.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        words = spread_words(own.detach(), _WORDS)
        if words is not None:
            checksum = zlib.crc32(words.cpu().contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


class Variables(NamedTuple):
    """The variables of a script's functions that are being executed.

    Attributes:
        found: All objects, and what a loop carries, by name.
        own: The names of those that the script's own code keeps something in.
    """

    found: dict[str, object]
    own: set[str]


class Clocks(NamedTuple):
    """What the clocks of a process show: the time of day, and two that count from its machine's start."""

    wall: float
    precise: float
    monotonic: float

    @classmethod
    def now(cls) -> Clocks:
        """Read them."""
        return cls(time.time(), time.perf_counter(), time.monotonic())


def script_variables(step: int | None = None, since: Clocks | None = None) -> Variables:
    """Return what the loop that calls this keeps in its variables.

    What an iteration sets before it reads it is computed in each step, and left out; so are the number of the step that
    the loop passes on, and what a clock has shown.

    Args:
        step: Number of the step that has ended; None before the first one, where any variable may be one that a loop
            will carry.
        since: The clocks when it was last looked; None for now.
    """
    search, modules = _VariableSearch(step, since or Clocks.now()), set[str]()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_own_module(name):
            search.look_into(frame)
            if _is_of_module(frame):
                modules.add(name)
            elif name not in modules:
                search.look_at_globals(frame)
        frame = frame.f_back
    return search.variables


class _VariableSearch:
    """Collects the variables that a loop keeps something in.

    Args:
        step: See `script_variables`.
        since: When it was last looked.
    """

    def __init__(self, step: int | None, since: Clocks) -> None:
        self.variables = Variables({}, set())
        self._step, self._clocks = step, (since, Clocks.now())

    def look_into(self, frame: types.FrameType) -> None:
        """Look at the variables of a frame."""
        loop, passed = carried_by(frame), named_in_call(frame.f_code, frame.f_lasti)
        named = _named_by_functions(frame.f_globals) if _is_of_module(frame) else frozenset[str]()
        for name, value in _locals_of(frame):
            self._take(name, value, loop, named, may_count=name in passed or not passed)

    def look_at_globals(self, frame: types.FrameType) -> None:
        """Look at the global variables that a function names; its module may not be executed now: in a thread, say."""
        own = globals_of(frame.f_code)
        named = own.used | (own.appended & _named_by_functions(frame.f_globals))
        for name in sorted(named & frame.f_globals.keys()):
            self._take(name, frame.f_globals[name], LoopVariables(), named)

    def _look_into_module(self, name: str, module: types.ModuleType) -> None:
        named = _named_by_functions(vars(module))
        for key, value in vars(module).items():
            if is_data(key, value):
                path = f"{name}.{key}"
                self._take(path, value, LoopVariables(), {path} if key in named else set())

    def _take(
        self, name: str, value: object, loop: LoopVariables, named: Collection[str], *, may_count: bool = True
    ) -> None:
        """Add a variable, if something is kept in it.

        Args:
            name: Its name.
            value: Its value.
            loop: How the loop uses variables.
            named: The global ones that functions use.
            may_count: Whether it may be the number of the step that the loop passes on.
        """
        if name.startswith("__") or name in self.variables.found or _is_code(value):
            return
        if isinstance(value, types.ModuleType):
            self._look_into_module(name, value)
            return
        # Numbers and text are replaced; a tensor, or an array, may be changed where it is.
        is_simple, is_changed_in_place = isinstance(value, SIMPLE), isinstance(value, (torch.Tensor, np.ndarray))
        is_own = self._step is None or name in loop.carried or name in named
        if is_changed_in_place or not is_simple:
            is_own = is_own or (name in loop.used and name not in loop.computed) or _holds_tensors(name, value, loop)
        is_step = may_count and _counts_steps(value, self._step)
        if is_simple and (not is_own or is_step or _is_of_clock(value, self._clocks)):
            return
        self.variables.found[name] = value
        if is_own and (is_simple or isinstance(value, _KEEPING) or _has_state(value)):
            self.variables.own.add(name)


def _holds_tensors(name: str, value: object, loop: LoopVariables) -> bool:
    """Return whether a list that a loop only appends to is no log: weights that are averaged at the end, say."""
    if name not in loop.appended or not isinstance(value, (list, deque)) or not value:
        return False
    newest = value[-1]
    items = newest.values() if isinstance(newest, dict) else newest if isinstance(newest, (list, tuple)) else [newest]
    return any(isinstance(item, torch.Tensor) and item.numel() > 1 for item in items)


def _has_state(value: object) -> bool:
    return callable(getattr(type(value), "state_dict", None))


def _named_by_functions(names: Mapping[str, Any]) -> frozenset[str]:
    """Return the global variables that the functions and classes of a module use more than `append` of."""
    used = frozenset[str]()
    for value in names.values():
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType) and function.__globals__ is names:
                used |= globals_of(function.__code__).used
    return used


def _is_of_module(frame: types.FrameType) -> bool:
    # Not by `f_locals`: a function's frame keeps what it is asked for.
    return frame.f_code.co_name == "<module>"


def _is_code(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return not is_own_module(value.__name__)
    return isinstance(value, types.FrameType) or (isinstance(value, type) and not is_own_module(value.__module__))


def _counts_steps(value: object, step: int | None) -> bool:
    return type(value) is int and step is not None and abs(value - step) <= 1


def _is_of_clock(value: object, clocks: tuple[Clocks, Clocks]) -> bool:
    """Return whether a number is what a clock has shown since it was last looked, or a second before."""
    since, now = clocks
    return type(value) is float and any(
        before - 1.0 <= value <= after for before, after in zip(since, now, strict=True)
    )


def _locals_of(frame: types.FrameType) -> list[tuple[str, object]]:
    """Return a frame's variables, without keeping them alive.

    Before Python 3.13 (PEP 667) a function's frame keeps the dict that it was asked for: the logits of a step would
    stay in memory until the next save.
    """
    variables = frame.f_locals
    found = list(variables.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return found
