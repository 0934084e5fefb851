"""Finds what training changes and no checkpoint holds, by comparing what can be reached from it.

No list of attributes is ever complete. So everything that can be reached from model, data, callbacks, loss, and the
script's frames is looked at when training begins, and again at its saves.
"""

from __future__ import annotations

import contextlib
import gc
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
from torch.utils.data.dataloader import _BaseDataLoaderIter

from checkpointing.data.generators import GENERATORS
from checkpointing.process.carried import LoopVariables, carried_by, globals_of, named_in_call
from checkpointing.process.reachable import (
    MAX_ITEMS,
    NAMESPACES,
    SIMPLE,
    Reached,
    attributes_of,
    is_data,
    is_own_module,
    locals_of,
    num_hooks,
    reachable,
    stored_by,
)
from checkpointing.proof.fingerprints import MOST_OBJECTS, PLAIN, of_object, of_plain, of_tensor

# What is searched, by name, and which of these names the script's own code keeps.
Roots = Callable[[int | None], tuple[Mapping[str, object], Collection[str]]]
# Containers, and what stands somewhere in them.
_KEEPING = (list, tuple, dict, set, deque, Iterator)
# Saves at which it compares: the first ones, since most of what is made late is found there, and one of so many later.
_FIRST_SAVES, _LATER_SAVES = 8, 4
# Reading all tensors of a large frozen module would take seconds.
_TENSORS_OF_A_MODULE = 16
_MOST_TEXT = 200
_NAMES_IN_A_MESSAGE = 20


class Coverage:
    """What one training changes besides what is saved.

    Args:
        roots: Returns what is searched at a step; None before the first one.
        covered: Returns the ids of modules and tensors that a checkpoint holds; what else they hold is searched.
        without: Returns the ids of objects that are left out, with what they hold.
        partly: Returns, by the ids of objects, the names of their attributes that a checkpoint holds.
        late: Names of roots that are not there before the first step, and need not have changed where they appear.
    """

    def __init__(
        self,
        roots: Roots,
        covered: Callable[[], set[int]],
        without: Callable[[], set[int]],
        partly: Callable[[], Mapping[int, Collection[str]]] = dict,
        late: Collection[str] = (),
    ) -> None:
        self._late = late
        self._roots, self._covered, self._without, self._partly = roots, covered, without, partly
        self._before: dict[str, int] | None = None
        # How objects were reached at the last look, by their ids.
        self._paths: dict[int, str] = {}
        self._num_saves = 0
        self._named = set[str]()

    def begin(self) -> None:
        """Note how everything is before the first step."""
        self._before, self._num_saves, self._named = self._digests(None), 0, set()

    def at_save(self, step: int) -> list[str] | None:
        """Compare at a save: each of the first ones, and then every fourth.

        Args:
            step: Its step.

        Returns:
            The paths of what has changed, which no earlier call has returned; None where nothing was compared.
        """
        self._num_saves += 1
        if self._num_saves > _FIRST_SAVES and self._num_saves % _LATER_SAVES:
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
        return [
            path
            for path in sorted(now)
            if before.get(path) != now[path] and (path in before or path.partition(".")[0] not in self._late)
        ]

    def _digests(self, step: int | None) -> dict[str, int]:
        covered = self._covered()
        roots, own = self._as_known(*self._roots(step))
        found: dict[str, int] = {}
        # What has been released may have given its id to something else.
        self._paths = {}
        for reached in reachable(roots, self._without(), own_roots=own, partly=self._partly()):
            if not isinstance(reached.value, SIMPLE):
                self._paths.setdefault(id(reached.value), reached.path)
            if id(reached.value) in covered and not isinstance(reached.value, torch.nn.Module):
                continue
            if isinstance(reached.value, torch.nn.Module):
                found.update(_of_module(reached.path, reached.value, covered))
                if reached.path in roots and (modes := _of_modes(reached.value)) is not None:
                    found[f"{reached.path} (modules in training)"] = modes
            elif (digest := _digest(reached)) is not None:
                found[reached.path] = digest
        return found

    def _as_known(self, roots: Mapping[str, object], own: Collection[str]) -> tuple[dict[str, object], set[str]]:
        """Return roots by the paths that their objects had at earlier looks: a variable has another name elsewhere."""
        found: dict[str, object] = {}
        kept = set[str]()
        for name, value in roots.items():
            known = name if isinstance(value, SIMPLE) else self._paths.get(id(value), name)
            path = name if known in found or known in roots else known
            found[path] = value
            if name in own:
                kept.add(path)
        return found, kept


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
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return of_object(value) if own else None
    if reached.is_own:
        return _of_own(value)
    return _of_state(value) if own else None


def _of_module(path: str, module: torch.nn.Module, covered: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield path and digest of a module's tensors that no checkpoint holds, and of each number that it has besides."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    kind: Any = type(module)
    # What the script's own code sets is looked at by its name.
    stored, _ = stored_by(kind)
    # What torch's own wrappers list, they list again.
    data = (*PLAIN, tuple) if kind.__module__.startswith("torch.") else (*PLAIN, tuple, list, dict, deque)
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training" or name in stored:
            continue
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, data) or _is_of_script(value):
            yield f"{path}.{name}", of_object(value)
    tensors = [tensor for tensor in tensors if id(tensor) not in covered]
    if tensors:
        yield path, _of_tensors(tensors)
    if hooks := num_hooks(module):
        yield f"{path} (hooks)", hooks


def _is_of_script(value: object) -> bool:
    function = getattr(value, "__func__", value)
    return isinstance(function, types.FunctionType) and is_own_module(function.__module__)


def _of_modes(model: torch.nn.Module) -> int | None:
    """Return the digest of which modules are in another mode than the model, training or not; None if none is."""
    other = [number for number, module in enumerate(model.modules()) if module.training is not model.training]
    return zlib.crc32(repr(other).encode()) if other else None


def _of_own(value: Any) -> int | None:
    """Return the digest of an object that the script's code keeps."""
    if isinstance(value, SIMPLE):
        return of_object(value)
    if isinstance(value, Iterator):
        return _of_iterator(value)
    if isinstance(value, NAMESPACES):
        return None  # What they hold is looked at by name.
    if not isinstance(value, (list, tuple, dict, set, deque)):
        # That there is something else now, or that it has another state.
        return of_object(value, (_of_state(value) or 0) ^ _of_arrays(value))
    digest = zlib.crc32(f"{type(value).__qualname__}{len(value)}".encode())
    if isinstance(value, dict):
        digest = of_object(list(itertools.islice(value, MOST_OBJECTS)), digest)
    if len(value) > MAX_ITEMS:
        # The search goes into shorter ones.
        distance = max(len(value) // MOST_OBJECTS, 1)
        for item in itertools.islice(value.values() if isinstance(value, dict) else value, 0, None, distance):
            digest = of_object(item, digest)
    return digest


def _of_arrays(value: Any) -> int:
    """Return the digest of the arrays and tensors that an object of a library holds: an estimator, a table."""
    kind = type(value)
    if is_own_module(kind.__module__) or isinstance(value, (type, torch.nn.Module)):
        return 0
    if callable(getattr(kind, "__array__", None)):
        with contextlib.suppress(Exception):  # It is not ours to call.
            # Of a long table, rows at equal distances.
            return of_object(np.asarray(value[:: max(len(value) // MOST_OBJECTS, 1)]))
    held = [one for one in attributes_of(value).values() if isinstance(one, (torch.Tensor, np.ndarray))]
    return of_object(held) if held else 0


def _of_state(value: Any) -> int | None:
    """Return the digest of what an object's `state_dict` returns; None if it has none.

    What has one is meant to be saved: a further scheduler, say.
    """
    if isinstance(value, (type, torch.nn.Module)) or not callable(getattr(type(value), "state_dict", None)):
        return None
    try:
        return of_object(value.state_dict())
    except Exception:  # of any kind: it is not ours to call
        return None


def _of_iterator(value: Iterator[Any]) -> int | None:
    """Return the digest of how far an iterator of the script is; None for one that is followed, or of another kind."""
    if isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        inside = locals_of(value.gi_frame)
        kept = [(name, one) for name, one in inside if isinstance(one, (int, float, str))]
        is_own = is_own_module(value.gi_frame.f_globals.get("__name__", ""))
        if not is_own or any(_is_followed(one) for _, one in inside):
            return None
        return zlib.crc32(repr((value.gi_frame.f_lasti, kept))[:_MOST_TEXT].encode())
    number = getattr(value, "_num_yielded", None)
    if isinstance(number, int):
        return of_plain(number)
    # How far those of Python's own are.
    return of_object(value) if type(value).__module__ in ("builtins", "itertools") else None


def _follows(value: object) -> bool:
    """Return whether something is of this library, or holds what is: a loop that asks a manager for its place."""
    held = [value, *attributes_of(value).values()] if hasattr(value, "__dict__") else [value]
    return any(_is_followed(one) or type(one).__module__.startswith("checkpointing.") for one in held)


def _is_followed(value: object) -> bool:
    frame = value.gi_frame if isinstance(value, types.GeneratorType) else None
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("checkpointing.")


def _of_tensors(tensors: list[torch.Tensor]) -> int:
    half = _TENSORS_OF_A_MODULE // 2
    chosen = tensors if len(tensors) <= 2 * half else [*tensors[:half], *tensors[-half:]]
    checksum = len(tensors)
    for tensor in chosen:
        checksum = of_tensor(tensor, checksum)
    return checksum


def suspended(without: Collection[int]) -> dict[str, object]:
    """Return iterators that are under way somewhere, by name: a loop over one keeps it where no variable shows it.

    Args:
        without: Ids of data sets that are followed.
    """
    found: dict[str, object] = {}
    for one in gc.get_objects():
        if type(one) is types.GeneratorType:
            frame = one.gi_frame
            if frame is None or one.gi_running or not is_own_module(frame.f_globals.get("__name__", "")):
                continue
            if any(_follows(value) for _, value in locals_of(frame)):
                continue
            # One that has not begun holds nothing yet.
            if frame.f_lasti >= 0:
                found.setdefault(f"a generator of {one.__qualname__}", one)
        elif issubclass(type(one), _BaseDataLoaderIter):  # Some objects answer `isinstance` with more than that.
            source: Any = one._dataset
            if id(source) not in without:
                found.setdefault(f"the position in a DataLoader over {type(source).__name__}", one)
    return found


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
        for name, value in locals_of(frame):
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
