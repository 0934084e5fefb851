"""Lays model weights out as a safetensors file (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

import torch

from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import FileImage, bytes_of
from checkpointing.host.shared_memory import round_up

SAFETENSORS_DTYPES = {
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
FORMAT_KEY, FORMAT = "format", "pt"


def safetensors_image(name: str, state: Mapping[str, torch.Tensor], differing: Set[str] = frozenset()) -> FileImage:
    """Return the image of a state dict's safetensors file.

    Tied weights are written once; the metadata maps each alias to its owner.

    Args:
        name: File name inside the checkpoint.
        state: Tensors by name.
        differing: Names of tensors that are not equal on all ranks.

    Raises:
        CheckpointError: A tensor's type has no safetensors equivalent.
    """
    owners: dict[tuple[Any, ...], str] = {}
    metadata = {FORMAT_KEY: FORMAT}
    kept: list[tuple[str, torch.Tensor]] = []
    for key, tensor in state.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"model.{key}: safetensors cannot hold {tensor.dtype}. Keep it as real tensors, or give it in `states`"
            )
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # One of that name is written itself: its alias would take the format's place.
        owner = owners.setdefault(identity, key) if tensor.numel() and key != FORMAT_KEY else key
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
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
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
