"""Finds what training changes and no checkpoint holds, by comparing what can be reached from it.

No list of attributes is ever complete. So everything that can be reached from model, data, callbacks, loss, and the
script's frames is looked at when training begins, and again at its saves.
"""

from __future__ import annotations

import inspect
import sys
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from checkpointing.data.generators import GENERATORS
from checkpointing.files import sharding
from checkpointing.process.reachable import SIMPLE, Reached, is_own_module, reachable
from checkpointing.state.samples import spread_words

Roots = Callable[[], Mapping[str, object]]
_WORDS = 8
# Reading all tensors of a large frozen module would take seconds.
_TENSORS_OF_A_MODULE = 16
_MOST_TEXT = 200
_NAMES_IN_A_MESSAGE = 8


class Coverage:
    """What one training changes besides what is saved.

    Args:
        roots: Returns what is searched, by name.
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
        self._before, self._num_saves, self._named = self._digests(), 0, set()

    def at_save(self) -> list[str]:
        """Compare at a save: the first, second, fourth, eighth, and so on.

        Returns:
            The paths of what has changed, which no earlier call has returned.
        """
        self._num_saves += 1
        if self._num_saves & (self._num_saves - 1):
            return []
        found = [path for path in self.changed() if path not in self._named]
        self._named.update(found)
        return found

    def changed(self) -> list[str]:
        """Return the paths of what has changed since `begin`."""
        before = self._before
        if before is None:
            return []
        now = self._digests()
        return [path for path in sorted(before.keys() & now.keys()) if before[path] != now[path]]

    def _digests(self) -> dict[str, int]:
        covered = self._covered()
        found: dict[str, int] = {}
        for reached in reachable(self._roots(), self._without()):
            if id(reached.value) in covered:
                continue
            digest = _digest(reached, covered)
            if digest is not None:
                found[reached.path] = digest
        return found


def listed(names: list[str]) -> str:
    """Return names for a message, the first few of many."""
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
    if not reached.is_own:
        return None
    if isinstance(value, SIMPLE):
        return zlib.crc32(repr(value)[:_MOST_TEXT].encode())
    # That there is something else now; and that a container has grown.
    size = len(value) if isinstance(value, (list, tuple, dict, set)) else 0
    return zlib.crc32(f"{type(value).__qualname__}{size}".encode())


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


def script_variables() -> dict[str, object]:
    """Return the variables of the script's functions that are being executed, by name: what its loop keeps.

    Numbers, text and tensors are left out: a loop computes them in each step.
    """
    return dict(_variables(sys._getframe(1)))


def _variables(frame: types.FrameType | None) -> Iterator[tuple[str, object]]:
    seen = set[str]()
    while frame is not None:
        if is_own_module(frame.f_globals.get("__name__", "")):
            for name, value in _locals_of(frame):
                is_code = isinstance(value, (type, types.ModuleType, types.FrameType, types.GeneratorType))
                if not isinstance(value, SIMPLE) and not is_code and not name.startswith("__") and name not in seen:
                    seen.add(name)
                    yield name, value
        frame = frame.f_back


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
