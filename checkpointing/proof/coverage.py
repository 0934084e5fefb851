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
from checkpointing.process.carried import carried_by
from checkpointing.process.reachable import MAX_ITEMS, SIMPLE, Reached, is_own_module, reachable
from checkpointing.state.samples import spread_words

# What is searched, by name, and which of these names the script's own code keeps.
Roots = Callable[[int | None], tuple[Mapping[str, object], Collection[str]]]
# Age of a clock's reading that a loop still sets in each step.
_LONGEST_S = 3600.0
_WORDS = 8
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
    """

    def __init__(self, roots: Roots, covered: Callable[[], set[int]], without: Callable[[], set[int]]) -> None:
        self._roots, self._covered, self._without = roots, covered, without
        self._before: dict[str, int] | None = None
        self._num_saves = 0
        self._named = set[str]()

    def begin(self) -> None:
        """Note how everything is before the first step."""
        self._before, self._num_saves, self._named = self._digests(None), 0, set()

    def at_save(self, step: int) -> list[str] | None:
        """Compare at a save: the first, second, fourth, eighth, and so on.

        Args:
            step: Its step.

        Returns:
            The paths of what has changed, which no earlier call has returned; None where nothing was compared.
        """
        self._num_saves += 1
        if self._num_saves & (self._num_saves - 1):
            return None
        found = [path for path in self.changed(step) if path not in self._named]
        self._named.update(found)
        return found

    def changed(self, step: int) -> list[str]:
        """Return the paths of what has changed since `begin`, or since it was there for the first time."""
        before = self._before
        if before is None:
            return []
        now = self._digests(step)
        found = [path for path in sorted(before.keys() & now.keys()) if before[path] != now[path]]
        self._before = {**now, **before}
        return found

    def _digests(self, step: int | None) -> dict[str, int]:
        covered = self._covered()
        roots, own = self._roots(step)
        found: dict[str, int] = {}
        for reached in reachable(roots, self._without(), own_roots=own):
            if id(reached.value) in covered:
                continue
            digest = _digest(reached, covered)
            if digest is not None:
                found[reached.path] = digest
        return found


def listed(names: list[str]) -> str:
    """Return names for a message, the first few of many; the items of a container are one."""
    names = list(dict.fromkeys(re.sub(r"(\[\d+\])+$", "[…]", name) for name in names))
    rest = len(names) - _NAMES_IN_A_MESSAGE
    return ", ".join(names[:_NAMES_IN_A_MESSAGE]) + (f", and {rest} more" if rest > 0 else "")


def _digest(reached: Reached, covered: Collection[int]) -> int | None:
    """Return the digest of what an object holds itself; None for what is not compared."""
    value = reached.value
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        tensors = [tensor for tensor in tensors if id(tensor) not in covered]
        return _of_tensors(tensors) if tensors else None
    if isinstance(value, GENERATORS):
        return None  # They are saved.
    # What a library keeps deeper inside, or as its own business, comes and goes.
    own = reached.is_own or ("._" not in reached.path and reached.path.count(".") == 1)
    if isinstance(value, torch.Tensor):
        return _of_tensors([value]) if own else None
    if isinstance(value, (np.ndarray, np.generic)):
        return _of_array(np.asarray(value)) if own and value.dtype.kind in "biufc" else None
    return _of_own(value) if reached.is_own else None


def _of_own(value: Any) -> int | None:
    """Return the digest of an object that the script's code keeps."""
    if isinstance(value, SIMPLE):
        return zlib.crc32(repr(value)[:_MOST_TEXT].encode())
    if isinstance(value, Iterator):
        return _of_iterator(value)
    if not isinstance(value, (list, tuple, dict, set, deque)):
        # That there is something else now.
        return zlib.crc32(type(value).__qualname__.encode())
    digest = zlib.crc32(f"{type(value).__qualname__}{len(value)}".encode())
    if len(value) > MAX_ITEMS:
        # The search goes into shorter ones.
        items = itertools.islice(value.values() if isinstance(value, dict) else value, 0, None, len(value) // MAX_ITEMS)
        for item in items:
            if isinstance(item, torch.Tensor):
                digest = zlib.crc32(_of_tensors([item]).to_bytes(4, "little"), digest)
            elif isinstance(item, SIMPLE):
                digest = zlib.crc32(repr(item)[:_MOST_TEXT].encode(), digest)
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


def script_variables(step: int | None = None) -> Variables:
    """Return what the loop that calls this keeps in its variables.

    What an iteration sets before it reads it is computed in each step, and left out; so are numbers of steps, and the
    time of a clock.

    Args:
        step: Number of the step that has ended; None before the first one, where any variable may be one that a loop
            will carry.
    """
    variables = Variables({}, set())
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own_module(frame.f_globals.get("__name__", "")):
            carried, used = carried_by(frame)
            for name, value in _locals_of(frame):
                if name.startswith("__") or name in variables.found or _is_code(value):
                    continue
                is_simple = isinstance(value, SIMPLE)
                is_own = step is None or (name in carried if is_simple else name in used or name in carried)
                if is_simple and (not is_own or _counts_steps(value, step) or _is_of_clock(value)):
                    continue
                variables.found[name] = value
                if is_own and (is_simple or isinstance(value, (list, tuple, dict, set, deque, Iterator))):
                    variables.own.add(name)
        frame = frame.f_back
    return variables


def _is_code(value: object) -> bool:
    return isinstance(value, (types.ModuleType, types.FrameType)) or (
        isinstance(value, type) and not is_own_module(value.__module__)
    )


def _counts_steps(value: object, step: int | None) -> bool:
    return type(value) is int and step is not None and abs(value - step) <= 1


def _is_of_clock(value: object) -> bool:
    clocks = time.time(), time.perf_counter(), time.monotonic()
    return type(value) is float and any(0 <= clock - value < _LONGEST_S for clock in clocks)


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
