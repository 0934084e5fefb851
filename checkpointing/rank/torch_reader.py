"""Parses safetensors and torch.save files in memory without running code from them and without copying tensors."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from checkpointing.rank import rng
from checkpointing.rank.safetensors_files import SAFETENSORS_DTYPES
from checkpointing.rank.trees import replaced
from checkpointing.reading import MemoryFile

# Of a record in a zip archive, as MS-DOS had it.
_IS_FOLDER = 0x10
# Where it leaves out the bytes, torch before 2.11 takes a storage's size times that of an element once too often.
_COUNTS_TWICE = TorchVersion(torch.__version__) < "2.11"


def model_state(buffer: memoryview) -> dict[str, torch.Tensor]:
    """A safetensors file's tensors, over its bytes (https://github.com/huggingface/safetensors#format).

    Raises:
        Exception: of any kind, where the file is not as the format wants it.
    """
    start = 8 + int.from_bytes(buffer[:8], "little")
    if start > len(buffer):
        raise ValueError(f"a header of {start - 8} bytes in a file of {len(buffer)}")
    header = json.loads(bytes(buffer[8:start]), object_pairs_hook=_object)
    aliases = header.pop("__metadata__", {})
    # Of text only, and without half surrogate pairs.
    "".join([*header, *aliases, *aliases.values()]).encode()
    dtypes = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
    state: dict[str, torch.Tensor] = {}
    covered = []
    for key, entry in header.items():
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], dtypes[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in [begin, end, *shape]):
            raise ValueError(f"{key}: offsets or shape are no counts")
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > len(buffer):
            raise ValueError(f"{key}: its shape does not fit its place")
        covered.append((begin, end))
        state[key] = _tensor(buffer, start + begin, end - begin, dtype).view(shape)
    ends = [0, *(end for _, end in sorted(covered))]
    if [begin for begin, _ in sorted(covered)] != ends[:-1] or start + ends[-1] != len(buffer):
        raise ValueError("its tensors overlap, or leave gaps")
    return state | {alias: state[owner] for alias, owner in aliases.items() if owner in state and alias not in state}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _tensor(buffer: memoryview, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over part of a buffer, with a storage of its own; copied only where the place is not aligned."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(buffer[offset : offset + nbytes]), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, offset=offset, count=nbytes // dtype.itemsize)


def plain(obj: Any) -> Any:
    """What stood for something while the file was read gives place to it."""
    return obj.array if isinstance(obj, rng.Words) else obj


def filled(skeleton: Any, buffer: memoryview, records: Sequence[tuple[int, int]]) -> Any:
    """The object with its tensors over the file's bytes; shared storages stay shared.

    Args:
        records: where the storages' bytes are, in the order in which pickling met them.

    Raises:
        ValueError: these are the records of other storages.
    """
    # Empty storages have nothing to be filled with, and torch does not remember which of them are shared.
    remaining = iter([record for record in records if record[1]])
    storages: dict[int, torch.UntypedStorage] = {}

    def fill(obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return plain(obj)
        storage = obj.untyped_storage()
        if not storage.nbytes():
            return obj
        if storage._cdata not in storages:
            offset, nbytes = next(remaining, (0, 0))
            size = storage.nbytes()
            if _COUNTS_TWICE and size != nbytes:
                size //= obj.element_size()
            if nbytes != size:
                raise ValueError(f"a storage of {size} bytes, where {nbytes} are recorded")
            storages[storage._cdata] = _tensor(buffer, offset, nbytes, torch.uint8).untyped_storage()
        tensor = torch.empty(0, dtype=obj.dtype)
        tensor.set_(storages[storage._cdata], obj.storage_offset(), obj.size(), obj.stride())
        return tensor.requires_grad_(obj.requires_grad)

    filled = replaced(skeleton, fill)
    if next(remaining, None) is not None:
        raise ValueError("there are more storages than tensors to fill")
    return filled


def check_archive(buffer: memoryview) -> None:
    """That records lie in the file one behind the other and as they are, as `torch.save` writes them.

    torch itself believes each record's own header where its bytes begin, and unpacks what says that it is compressed.
    Of what says that it is a folder it reads nothing: the tensor holds whatever was in memory.

    Raises:
        ValueError: they do not.
        BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(io.BufferedReader(MemoryFile(buffer))) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        ends = [*(record.header_offset for record in records[1:]), archive.start_dir]
    for record, end in zip(records, ends, strict=True):
        begin = record.header_offset
        # A record's own header, its name, a filling, its bytes, and perhaps a descriptor.
        mark, how, name_bytes, extra_bytes = struct.unpack("<4s4xH16xHH", buffer[begin : begin + 30])
        rest = end - (begin + 30 + name_bytes + extra_bytes + record.file_size)
        stored = {how, record.compress_type} == {zipfile.ZIP_STORED} and record.compress_size == record.file_size
        if mark != b"PK\3\4" or rest not in (0, 16, 24) or not stored or record.external_attr & _IS_FOLDER:
            raise ValueError(f"record {record.filename!r} is compressed, or not where it should be")
