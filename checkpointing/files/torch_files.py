"""Objects as `torch.save` files: laid out, read back, and checked for that before the first save is promised.

A file is read without running code from it, and without copying tensors.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import sys
import threading
import zipfile
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.serialization import get_crc32_options, set_crc32_options, skip_data
from torch.torch_version import TorchVersion

from checkpointing.commit.reading import MemoryFile
from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import FileImage, tensor_over
from checkpointing.process import rng
from checkpointing.process.trees import FrozenDefaultDict, FrozenDeque, replaced, tensors_in

# The attribute of a folder in a zip archive, from MS-DOS.
_IS_FOLDER = 0x10
# What these come back as.
_READ_AS: dict[type, type] = {FrozenDeque: deque, FrozenDefaultDict: defaultdict}
# Under `skip_data`, torch before 2.11 multiplies a storage's size by the element size once too often.
_COUNTS_TWICE = TorchVersion(torch.__version__) < "2.11"
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def torch_bytes(obj: object) -> bytes:
    """Return what `torch.save` writes; for small objects."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


_tagging = threading.local()


def _tag(storage: Any) -> str | None:
    return "cpu" if getattr(_tagging, "portable", False) else None


# Asked before torch's own packages (10 for the CPU, 20 for CUDA). Answers only inside `_portable_tags`; reads nothing.
torch.serialization.register_package(1, _tag, lambda _storage, _tag: None)


@contextlib.contextmanager
def _portable_tags() -> Iterator[None]:
    """Have `torch.save` in this thread leave out which device a tensor is on.

    Device names differ between ranks, also in length (`cuda:7`, `cuda:10`). But each rank writes a part of one file,
    at offsets that must be equal on all ranks.
    """
    _tagging.portable = True
    try:
        yield
    finally:
        _tagging.portable = False


class TorchFileLayout:
    """Makes images of the `torch.save` file of a name without passing the tensors' bytes through Python.

    Under `skip_data`, `torch.save` writes a sparse file with everything but the tensors' bytes. Its records `data/0`,
    `data/1`, ... are the storages, in the order in which pickling meets them. Their offsets are looked up once and
    reused while the sizes stay the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._signature: tuple[int, tuple[int, ...]] | None = None
        self._offsets: list[int] = []

    @staticmethod
    def warm_up() -> None:
        """Have torch load what it needs at the first use."""
        TorchFileLayout("").image({"": torch.zeros(1)})

    def image(self, obj: object) -> FileImage:
        """Return the image of the file that `torch.save(obj)` would write; its tensors are still to be copied."""
        storages: dict[int, torch.UntypedStorage] = {}
        order: list[int] = []
        for tensor in tensors_in(obj):
            storage = tensor.untyped_storage()
            order.append(storage._cdata)
            storages.setdefault(storage._cdata, storage)
        fd = os.memfd_create("checkpoint-skeleton", os.MFD_CLOEXEC)
        try:
            path = f"/proc/self/fd/{fd}"
            checksums = get_crc32_options()
            set_crc32_options(False)
            try:
                # Not by the path: torch would name the archive after the descriptor, and the file's bytes would differ
                # between nodes.
                with skip_data(), _portable_tags(), os.fdopen(os.dup(fd), "wb", buffering=0) as file:
                    torch.save(obj, file)
            finally:
                set_crc32_options(checksums)
            nbytes = os.fstat(fd).st_size
            signature = (nbytes, tuple(storages[key].nbytes() for key in order))
            if signature != self._signature:
                self._offsets = self._find_offsets(path, [storage.nbytes() for storage in storages.values()])
                self._signature = signature
            return self._read_skeleton(fd, nbytes, storages)
        finally:
            os.close(fd)

    def _read_skeleton(self, fd: int, nbytes: int, storages: dict[int, torch.UntypedStorage]) -> FileImage:
        placed = dict(zip(storages, self._offsets, strict=True))
        image = FileImage(self._name, nbytes)
        position = 0
        for key, offset in sorted(placed.items(), key=lambda item: item[1]):
            size = storages[key].nbytes()
            if size == 0:
                continue
            image.literals.append((position, os.pread(fd, offset - position, position)))
            whole = torch.empty(0, dtype=torch.uint8, device=storages[key].device).set_(storages[key])
            image.tensors.append((offset, whole))
            position = offset + size
        image.literals.append((position, os.pread(fd, nbytes - position, position)))
        return image

    def _find_offsets(self, path: str, sizes: Sequence[int]) -> list[int]:
        """Return where the bytes of each storage begin."""
        records = storage_records(path)
        if [nbytes for _, nbytes in records] != list(sizes):
            raise ValueError(
                f"{self._name}: a tensor is inside another object, where it cannot be found; keep tensors in dicts, "
                "lists and tuples only"
            )
        return [offset for offset, _ in records]


def storage_records(file: Any) -> list[tuple[int, int]]:
    """Return offset and size, in bytes, of every storage in a `torch.save` file (a path, or open), as pickled.

    Raises:
        ValueError: The bytes are in another order than this machine's.
    """
    reader: Any = torch._C.PyTorchFileReader(file)
    if reader.has_record("byteorder") and reader.get_record("byteorder") != sys.byteorder.encode():
        raise ValueError(f"written on a machine of another byte order than {sys.byteorder} endian")
    # PyTorchFileReader's own get_record_size exists since torch 2.13 only. All names begin with the archive's.
    with zipfile.ZipFile(file) as archive:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
    records: list[tuple[int, int]] = []
    while (name := f"data/{len(records)}") in sizes:
        records.append((reader.get_record_offset(name), sizes[name]))
    return records


def plain(obj: Any) -> Any:
    """Return the array that `rng.Words` stood for while the file was read; anything else unchanged."""
    return obj.array if isinstance(obj, rng.Words) else obj


def filled(skeleton: Any, buffer: memoryview, records: Sequence[tuple[int, int]]) -> Any:
    """Return the object with its tensors, which have no contents, over the file's bytes; shared storages stay shared.

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
            storages[storage._cdata] = tensor_over(buffer, offset, nbytes, torch.uint8).untyped_storage()
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


def check_readable(name: str, obj: object) -> None:
    """Write an object and read it back as it will be restored; of its tensors, one of each kind, without data.

    Call this in the training thread: the classes that the reader may build are a setting of the whole process, and
    the script's own threads may read files, too.

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
    written = _READ_AS.get(type(value), type(value))
    kind = f"{written.__module__}.{written.__qualname__}".removeprefix("builtins.")
    if isinstance(value, defaultdict):
        kind = f"a {kind} of {value.default_factory!r}"
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
        if isinstance(obj, defaultdict):
            bare = type(obj)(obj.default_factory)
        with torch.serialization.safe_globals(rng.SAFE_GLOBALS):
            torch.load(io.BytesIO(torch_bytes(bare)), weights_only=True)
    except Exception:
        return path, obj
    return None


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, deque)):
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
    if _READ_AS.get(type(obj), type(obj)) is not type(found):
        return path, obj
    if isinstance(obj, (dict, list, tuple, deque)):
        parts, others = list(_parts(obj)), list(_parts(found))
        if [step for step, _ in parts] != [step for step, _ in others]:
            return path, obj
        pairs = zip(parts, others, strict=True)
        return next((p for (step, a), (_, b) in pairs if (p := _first_difference(a, b, path + step)) is not None), None)
    # NaN differs from itself.
    return None if obj == found or (obj != obj and found != found) else (path, obj)
