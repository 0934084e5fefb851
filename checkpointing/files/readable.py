"""Checks that a state can be read back from a checkpoint, before the first one is promised."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.serialization import skip_data

from checkpointing.errors import CheckpointError
from checkpointing.files.torch_files import torch_bytes
from checkpointing.process import rng

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_readable(name: str, obj: object) -> None:
    """Write an object and read it back as it will be restored; of its tensors, one of each kind, without data.

    Call this in the training thread: the classes that the reader may build are a setting of the whole process, and
    the script's own threads may read files, too.

    Args:
        name: The checkpoint's file, for the message.
        obj: The object that `torch.save` will write to this file.

    Raises:
        CheckpointError: The object cannot be read, or part of it comes back changed; the message has its path.
    """
    stem = name.partition(".")[0]
    sample = _one_tensor_of_each_kind(obj, set())
    fd = os.memfd_create("checkpoint-check", os.MFD_CLOEXEC)
    try:
        file = f"/proc/self/fd/{fd}"
        with torch.serialization.safe_globals(rng.SAFE_GLOBALS), skip_data():
            torch.save(sample, file)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        path = _unreadable(obj, stem)
        if path is None:
            raise CheckpointError(f"{name} could not be read back: {type(error).__name__}: {error}") from None
        raise _refusal(*path) from None
    finally:
        os.close(fd)
    path = _first_difference(sample, found, stem)
    if path is not None:
        raise _refusal(*path)


def _refusal(path: str, value: object) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        kind = f"a tensor of layout {value.layout}"
    # optimizer['param_groups'][0]['lr'] reads better as optimizer.param_groups[0]['lr'].
    path = re.sub(r"^(\w+)\['([A-Za-z_]\w*)'\]", r"\1.\2", path)
    return CheckpointError(
        f"{path}: {kind} cannot be kept in a checkpoint, which is read without running code from it. Use tensors, "
        "numbers, text, lists, tuples and dicts there"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided


def _one_tensor_of_each_kind(obj: object, seen: set[object]) -> object:
    """Copy plain containers without the tensors that can be read back if an earlier one can.

    An optimizer has thousands of tensors, and the training thread waits.
    """
    if isinstance(obj, torch.Tensor):
        if not _is_plain(obj):
            return obj
        kind = (type(obj), obj.dtype, obj.device, obj.requires_grad, obj.is_conj(), obj.is_neg())
        if kind in seen:
            return None
        seen.add(kind)
        return obj
    if type(obj) is dict:
        return {key: _one_tensor_of_each_kind(value, seen) for key, value in obj.items()}
    if type(obj) is list or type(obj) is tuple:
        return type(obj)(_one_tensor_of_each_kind(value, seen) for value in obj)
    return obj


def _unreadable(obj: object, path: str) -> tuple[str, object] | None:
    """Find the innermost part that cannot be read back by itself."""
    if isinstance(obj, torch.Tensor):
        return None if _is_plain(obj) else (path, obj)
    for step, value in _parts(obj):
        found = _unreadable(value, path + step)
        if found is not None:
            return found
    try:
        # All items can be read, so an empty container stands for this one.
        bare: object = type(obj)() if isinstance(obj, (dict, list, tuple)) else obj
        with torch.serialization.safe_globals(rng.SAFE_GLOBALS):
            torch.load(io.BytesIO(torch_bytes(bare)), weights_only=True)
    except Exception:
        return path, obj
    return None


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{number}]", value) for number, value in enumerate(obj))


def _first_difference(obj: object, found: object, path: str) -> tuple[str, object] | None:
    """Find the first part that came back changed; None where nothing did."""
    if isinstance(obj, torch.Tensor):
        if not _is_plain(obj):
            return path, obj
        same = isinstance(found, torch.Tensor) and (obj.dtype, obj.shape) == (found.dtype, found.shape)
        return None if same else (path, obj)
    if isinstance(obj, np.ndarray):
        found = getattr(found, "array", found)
        same = isinstance(found, np.ndarray) and obj.dtype == found.dtype and np.array_equal(obj, found)
        return None if same else (path, obj)
    if type(obj) is not type(found):
        return path, obj
    if isinstance(obj, (dict, list, tuple)):
        assert isinstance(found, (dict, list, tuple))
        parts, others = list(_parts(obj)), list(_parts(found))
        if [step for step, _ in parts] != [step for step, _ in others]:
            return path, obj
        pairs = zip(parts, others, strict=True)
        return next((p for (step, a), (_, b) in pairs if (p := _first_difference(a, b, path + step)) is not None), None)
    # NaN differs from itself.
    return None if obj == found or (obj != obj and found != found) else (path, obj)
