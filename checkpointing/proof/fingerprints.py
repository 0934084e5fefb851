"""Fingerprints of any object, as far as Python itself can say what it holds.

No list of types is complete. What a type does not show by attributes or items it shows by the pickle protocol
(`object.__reduce_ex__`): partial functions, arrays, iterators and how far they are, numbers of other kinds, ranges.
Nothing is pickled, and it is asked of Python's own types only: others may do anything when they are asked.
"""

from __future__ import annotations

import enum
import io
import itertools
import sqlite3
import sys
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from checkpointing.files import sharding
from checkpointing.state.samples import spread_words

# Numbers and text.
PLAIN = (int, float, complex, str, bytes, bool, type(None))
# Up to so many words a tensor, or numbers an array, is read whole, and otherwise so many of it.
_SMALL, _WORDS = 8192, 256
_MOST_TEXT = 200
# Objects and levels below one that is asked.
MOST_OBJECTS, DEPTH = 1000, 4
_PROTOCOL = 4


def of_plain(value: object, digest: int = 0) -> int:
    """Return the digest of a number or a text; of a long one, of its begin, its end and its length."""
    text = value if isinstance(value, (str, bytes)) else repr(value)
    if len(text) > 2 * _MOST_TEXT:
        text = repr((len(text), text[:_MOST_TEXT], text[-_MOST_TEXT:]))
    return zlib.crc32(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), digest)


def of_array(array: np.ndarray[Any, Any]) -> int:
    """Return the digest of an array of any kind: all of a small one, numbers at equal distances of a large one."""
    flat = array.reshape(-1)
    if array.dtype.kind in "OUSVMm":
        # Of these only the first ones: they may be long texts.
        return of_plain(repr((array.shape, flat[: _WORDS * 4].tolist()))[: 100 * _MOST_TEXT])
    chosen = flat if len(flat) <= _SMALL else flat[:: (len(flat) // _WORDS) | 1]
    return zlib.crc32(np.ascontiguousarray(chosen).tobytes(), zlib.crc32(repr(array.shape).encode()))


def of_tensor(tensor: torch.Tensor, checksum: int = 0) -> int:
    """Return the digest of a tensor on any device: all of a small one, words at equal distances of a large one."""
    if torch.nn.parameter.is_lazy(tensor):
        return checksum
    own: Any = tensor._local_tensor if sharding.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    words = spread_words(own.detach(), _SMALL if own.numel() <= _SMALL else _WORDS)
    if words is None:
        return checksum
    return zlib.crc32(words.cpu().contiguous().view(torch.uint8).numpy().tobytes(), checksum)


def of_function(function: Any) -> int:
    """Return a digest by which one function differs from another, without what its closure holds."""
    if isinstance(function, types.MethodType):
        return zlib.crc32(type(function.__self__).__qualname__.encode(), of_function(function.__func__))
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    place = (code.co_filename, code.co_firstlineno, code.co_code) if isinstance(code, types.CodeType) else ()
    return zlib.crc32(repr((name, place)).encode())


def of_object(value: object, digest: int = 1) -> int:
    """Return the digest of what an object holds, as far as it shows that, a thousand objects and four levels deep."""
    try:
        return _Walk().of(value, digest, DEPTH)
    except Exception:  # of any kind: another thread changes it, or it may not be asked
        return zlib.crc32(type(value).__qualname__.encode(), digest)


class _Walk:
    """One fingerprint in the making."""

    def __init__(self) -> None:
        self._left = MOST_OBJECTS

    def of(self, value: Any, digest: int, depth: int) -> int:
        """Continue a digest with an object."""
        self._left -= 1
        if isinstance(value, (*PLAIN, torch.dtype, enum.Enum)):
            return of_plain(value if isinstance(value, PLAIN) else repr(value), digest)
        if isinstance(value, torch.Tensor):
            return of_tensor(value, digest)
        if isinstance(value, (np.ndarray, np.generic)):
            return zlib.crc32(of_array(np.asarray(value)).to_bytes(4, "little"), digest)
        if isinstance(value, _FUNCTIONS):
            return zlib.crc32(of_function(value).to_bytes(4, "little"), digest)
        digest = zlib.crc32(type(value).__qualname__.encode(), digest)
        if not depth or self._left <= 0:
            return digest
        return self._all(_parts_of(value), digest, depth - 1)

    def _all(self, parts: Iterable[Any], digest: int, depth: int) -> int:
        for part in parts:
            if self._left <= 0:
                break
            digest = self.of(part, digest, depth)
        return digest


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, type)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return list(value.values())
    if isinstance(value, Mapping):
        return itertools.chain.from_iterable(list(value.items()))
    if isinstance(value, (list, tuple, deque, memoryview)):
        return value
    if isinstance(value, (set, frozenset)):
        # Their order is not that of their contents.
        return [sum(map(of_object, itertools.islice(value, MOST_OBJECTS))), len(value)]
    if isinstance(value, weakref.WeakSet):
        return [sum(map(of_object, itertools.islice(list(value), MOST_OBJECTS))), len(value)]
    if isinstance(value, types.GeneratorType):
        return ()  # How far it is, is seen by its frame.
    for kind, shown in _SHOWN.items():
        if isinstance(value, kind):
            return shown(value)
    return _reduced(value)


# What some objects hold that cannot be pickled.
_SHOWN: dict[type, Callable[[Any], Iterable[Any]]] = {
    io.BytesIO: lambda file: (file.getvalue(), file.tell()),
    io.StringIO: lambda file: (file.getvalue(), file.tell()),
    io.IOBase: lambda file: (file.tell(),) if not file.closed and file.seekable() else (file.closed,),
    sqlite3.Connection: lambda connection: (connection.total_changes,),
    weakref.ReferenceType: lambda reference: (reference(),),
    types.MappingProxyType: lambda mapping: mapping.values(),
}


def _reduced(value: Any) -> Iterable[Any]:
    """Return what the pickle protocol says of an object of Python's own; nothing of another one."""
    if type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
        return ()
    try:
        found = value.__reduce_ex__(_PROTOCOL)
    except Exception:  # of any kind: it cannot be pickled
        return ()
    if not isinstance(found, tuple):
        return (found,)
    # The first is how it is made; items come last, as iterators.
    items = [itertools.islice(one, MOST_OBJECTS) for one in found[3:] if isinstance(one, Iterator)]
    # The state comes before the arguments: an iterator's place before the list that it is in.
    parts = [one for one in reversed(found[1:]) if not isinstance(one, Iterator)]
    return itertools.chain(parts, *items)
