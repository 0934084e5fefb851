"""Parses safetensors and torch.save files in memory, without running code from them and without copying tensors."""

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

from checkpointing.commit.reading import MemoryFile
from checkpointing.files.safetensors_files import FORMAT, FORMAT_KEY, SAFETENSORS_DTYPES
from checkpointing.process import rng
from checkpointing.process.trees import replaced

# The attribute of a folder in a zip archive, from MS-DOS.
_IS_FOLDER = 0x10
# Under `skip_data`, torch before 2.11 multiplies a storage's size by the element size once too often.
_COUNTS_TWICE = TorchVersion(torch.__version__) < "2.11"


def model_state(buffer: memoryview) -> dict[str, torch.Tensor]:
    """Return a safetensors file's tensors, over its bytes (https://github.com/huggingface/safetensors#format).

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
    dtypes = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
    state: dict[str, torch.Tensor] = {}
    covered = []
    for key, entry in header.items():
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], dtypes[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in [begin, end, *shape]):
            raise ValueError(f"{key}: offsets or shape are not counts")
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > len(buffer):
            raise ValueError(f"{key}: its shape does not fit its offsets")
        covered.append((begin, end))
        state[key] = _tensor(buffer, start + begin, end - begin, dtype).view(shape)
    ends = [0, *(end for _, end in sorted(covered))]
    if [begin for begin, _ in sorted(covered)] != ends[:-1] or start + ends[-1] != len(buffer):
        raise ValueError("its tensors overlap, or leave gaps")
    # Every file says that its format is "pt": no alias of a tensor of that name.
    aliases = {alias: owner for alias, owner in aliases.items() if alias != FORMAT_KEY or owner != FORMAT}
    return state | {alias: state[owner] for alias, owner in aliases.items() if owner in state and alias not in state}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _tensor(buffer: memoryview, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over part of a buffer, with a storage of its own; a copy where the offset is not aligned."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(buffer[offset : offset + nbytes]), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, offset=offset, count=nbytes // dtype.itemsize)


def plain(obj: Any) -> Any:
    """Return the array that `rng.Words` stood for while the file was read; anything else unchanged."""
    return obj.array if isinstance(obj, rng.Words) else obj


def filled(skeleton: Any, buffer: memoryview, records: Sequence[tuple[int, int]]) -> Any:
    """Return the object with its tensors over the file's bytes; shared storages stay shared.

    Args:
        skeleton: The object, with tensors that have no contents.
        buffer: The file's bytes.
        records: Offset and size of each storage's bytes, in the order in which pickling met them.

    Raises:
        ValueError: The records are those of other storages.
    """
    # Empty storages need no bytes, and torch does not remember which of them are shared.
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
    """Check that the records follow each other in the file, uncompressed, as `torch.save` writes them.

    torch itself trusts each record's own header about where its bytes begin, and unpacks a record marked as compressed.
    It reads nothing of a record marked as a folder: the tensor holds whatever was in memory.

    Raises:
        ValueError: The records are laid out in another way.
        BadZipFile: The file is not an archive.
    """
    with zipfile.ZipFile(io.BufferedReader(MemoryFile(buffer))) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        ends = [*(record.header_offset for record in records[1:]), archive.start_dir]
    for record, end in zip(records, ends, strict=True):
        begin = record.header_offset
        # A record is its header, name, padding, bytes, and possibly a descriptor.
        mark, how, name_bytes, extra_bytes = struct.unpack("<4s4xH16xHH", buffer[begin : begin + 30])
        rest = end - (begin + 30 + name_bytes + extra_bytes + record.file_size)
        stored = {how, record.compress_type} == {zipfile.ZIP_STORED} and record.compress_size == record.file_size
        if mark != b"PK\3\4" or rest not in (0, 16, 24) or not stored or record.external_attr & _IS_FOLDER:
            raise ValueError(f"record {record.filename!r} is compressed, or not where it should be")
