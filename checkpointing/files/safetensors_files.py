"""Model weights as safetensors files (https://github.com/huggingface/safetensors#format): laid out, and read back.

A file is read without running code from it, and without copying tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from checkpointing.commit.reading import read_shared
from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import FileImage, bytes_of, tensor_over
from checkpointing.host.shared_memory import round_up

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

# What the files' metadata says of all of them, as Hugging Face's do.
_FORMAT_KEY, _FORMAT = "format", "pt"


def safetensors_image(name: str, state: Mapping[str, torch.Tensor], differing: Set[str] = frozenset()) -> FileImage:
    """Return the image of a state dict's safetensors file.

    Tied weights are written once; the metadata maps each alias to its owner. `differing` are the names of tensors that
    are not equal on all ranks.

    Raises:
        CheckpointError: A tensor's type has no safetensors equivalent.
    """
    owners: dict[tuple[Any, ...], str] = {}
    metadata = {_FORMAT_KEY: _FORMAT}
    kept: list[tuple[str, torch.Tensor]] = []
    for key, tensor in state.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"model.{key}: safetensors cannot hold {tensor.dtype}. Keep it as real tensors, or give it in `states`"
            )
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # One of that name is written itself: its alias would take the format's place.
        owner = owners.setdefault(identity, key) if tensor.numel() and key != _FORMAT_KEY else key
        if owner == key:
            kept.append((key, tensor))
        else:
            metadata[key] = owner
    # Widest type first keeps every tensor aligned without gaps, which the format forbids.
    kept.sort(key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key, tensor in kept:
        header[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    start = round_up(8 + len(text))
    literal = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    image = FileImage(name, start + offset, literals=[(0, literal)])
    for key, tensor in kept:
        begin = start + header[key]["data_offsets"][0]
        target = image.alone if key in differing else image.tensors
        target.append((begin, bytes_of(tensor.detach().contiguous().reshape(-1))))
    return image


def model_state(buffer: memoryview) -> dict[str, torch.Tensor]:
    """Return a safetensors file's tensors, over its bytes.

    Raises:
        Exception: Of any kind, where the file does not follow the format.
    """
    start = 8 + int.from_bytes(buffer[:8], "little")
    if start > len(buffer):
        raise ValueError(f"a header of {start - 8} bytes in a file of {len(buffer)}")
    header = json.loads(bytes(buffer[8:start]), object_pairs_hook=_object)
    aliases = header.pop("__metadata__", {})
    # Raises where something is not text, or has half a surrogate pair.
    "".join([*header, *aliases, *aliases.values()]).encode()
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    state: dict[str, torch.Tensor] = {}
    covered = []
    for key, entry in header.items():
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], dtypes[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in [begin, end, *shape]):
            raise ValueError(f"{key}: offsets or shape are not counts")
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > len(buffer):
            raise ValueError(f"{key}: its shape does not fit its offsets")
        covered.append((begin, end))
        state[key] = tensor_over(buffer, start + begin, end - begin, dtype).view(shape)
    ends = [0, *(end for _, end in sorted(covered))]
    if [begin for begin, _ in sorted(covered)] != ends[:-1] or start + ends[-1] != len(buffer):
        raise ValueError("its tensors overlap, or leave gaps")
    # Every file says that its format is "pt": no alias of a tensor of that name.
    aliases = {alias: owner for alias, owner in aliases.items() if alias != _FORMAT_KEY or owner != _FORMAT}
    return state | {alias: state[owner] for alias, owner in aliases.items() if owner in state and alias not in state}


def mapped_state(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of the files of one model, over the mapped files; raises as `model_state` does, or OSError."""
    state: dict[str, torch.Tensor] = {}
    for path in paths:
        state |= model_state(read_shared(path, algorithm=None)[0])
    return state


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
