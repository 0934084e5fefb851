"""Whether a pickle of torch's checkpoints makes nothing but data: who can write to a bucket must not run code here.

`torch.distributed.checkpoint` unpickles the index of a checkpoint, and every value that is no tensor, without a limit.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import re
import sys
from collections import defaultdict, deque
from typing import Any

import torch

from checkpointing.errors import CheckpointError
from checkpointing.process.rng import SAFE_GLOBALS

# Modules of torch whose data classes and enumerations describe a checkpoint.
_OF_TORCH = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.distributed.tensor.")
_PLAIN = {
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("pathlib._local", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
# Of the standard library, besides what weights_only reads: data, too.
_VALUES = (
    *(io.BytesIO, pathlib.PosixPath, pathlib.PurePosixPath, defaultdict, deque, range, slice, complex, frozenset),
    *(datetime.date, datetime.datetime, datetime.timedelta, datetime.timezone),
    *(int, float, str, bool, list, dict, set, tuple),
)
_KINDS_OF_TENSORS = (torch.dtype, torch.layout, torch.memory_format)


def check_index(data: bytes, where: str) -> None:
    """Check the index of a checkpoint.

    Raises:
        CheckpointError: It cannot be parsed, or it names something that is not data.
    """
    try:
        _Harmless(io.BytesIO(data)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: its index names {error}, which is no data: it may have been forged") from None
    except Exception as error:
        raise CheckpointError(f"{where}: its index cannot be parsed ({type(error).__name__}: {error})") from None


def check_value(data: bytes, where: str, name: str) -> None:
    """Check a value that `torch.save` has written; kinds of a script's own are those of `add_safe_globals`.

    Raises:
        CheckpointError: It cannot be parsed, or it is of a kind that may run code.
    """
    try:
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *_VALUES]):
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        first = named[1] if named else next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"{where}: {name} is not read: it is damaged, or of a kind that may run code ({first[:200]}). If your "
            "program saves that, declare it: torch.serialization.add_safe_globals([…])"
        ) from None


class _Sealed(type):
    """Of a class that no pickle can change: the instruction BUILD sets attributes of whatever it is given."""

    @property
    def __setstate__(cls) -> Any:
        raise CheckpointError("attributes of a class")


class _StandIn(metaclass=_Sealed):
    """In the place of a class that an index may name: nothing of torch's is made while it is checked."""

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take whatever the class takes."""

    def __setstate__(self, state: Any) -> None:
        """Take whatever state there is."""

    def __hash__(self) -> int:
        return id(self)


class _Harmless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name) if module in ("builtins", "collections") else _StandIn
        # A name with dots leads through other objects. Nothing is imported for a pickle.
        found = getattr(sys.modules.get(module), name, None) if "." not in name else None
        if module == "torch" and isinstance(found, _KINDS_OF_TENSORS):
            return found
        is_data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
        if module.startswith(_OF_TORCH) and is_data:
            return _StandIn
        raise CheckpointError(f"{module}.{name}")
