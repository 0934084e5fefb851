"""Lays a training state out as the bytes of its checkpoint files, and copies it there.

A snapshot is not serialised: shapes do not change during a run, so every tensor has a fixed place in its file and the
arena holds the file images themselves. Only headers, and state too small to matter, are made anew each time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import re
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from checkpointing.errors import CheckpointError
from checkpointing.rank import rng
from checkpointing.rank.device import Device
from checkpointing.shared_memory import PAGE_BYTES, round_up

# https://github.com/huggingface/safetensors#format
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


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# numpy's numbers that are Python's in every respect. Of others the type would be lost, and with it how they round.
_EXACT: dict[type, type] = {np.float64: float, np.int64: int, np.bool_: bool}


@dataclass(frozen=True)
class FileImage:
    """A file as it will lie on disk.

    Attributes:
        name: file name inside the checkpoint.
        nbytes: its size.
        literals: bytes at offsets.
        tensors: at offsets, flat uint8 views of the live state; whoever copies reads them at that moment.
        own: likewise, what only this rank holds.
        alone: likewise, what differs between the ranks and is taken from the node's first one.
    """

    name: str
    nbytes: int
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    tensors: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    own: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    alone: list[tuple[int, torch.Tensor]] = field(default_factory=list)


def blob_image(name: str, data: bytes) -> FileImage:
    """A file of ready-made bytes."""
    return FileImage(name, len(data), literals=[(0, data)])


def torch_bytes(obj: object) -> bytes:
    """`torch.save` into memory, for small objects."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def safetensors_image(name: str, state: Mapping[str, torch.Tensor], differing: Set[str] = frozenset()) -> FileImage:
    """A safetensors file of a state dict. Tied weights are written once; the metadata maps each alias to its owner.

    Args:
        differing: names of tensors that are not equal on all ranks.

    Raises:
        CheckpointError: a tensor's type has no safetensors equivalent.
    """
    owners: dict[tuple[Any, ...], str] = {}
    metadata = {"format": "pt"}
    kept: list[tuple[str, torch.Tensor]] = []
    for key, tensor in state.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"model.{key}: safetensors cannot hold {tensor.dtype}. Keep it as real tensors, or give it in `states`"
            )
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = owners.setdefault(identity, key) if tensor.numel() else key
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


_tagging = threading.local()


def _tag(storage: Any) -> str | None:
    return "cpu" if getattr(_tagging, "portable", False) else None


# Asked before torch's own (10 for the CPU, 20 for CUDA); answers only inside `_portable_tags`, and reads nothing.
torch.serialization.register_package(1, _tag, lambda _storage, _tag: None)


@contextlib.contextmanager
def _portable_tags() -> Iterator[None]:
    """In this thread, `torch.save` does not write which device a tensor is on.

    Ranks are on different ones, whose names differ, also in their length (`cuda:7`, `cuda:10`); but each writes a part
    of one file, at offsets that must be the same on all.
    """
    _tagging.portable = True
    try:
        yield
    finally:
        _tagging.portable = False


class TorchFileLayout:
    """Makes images of a `torch.save` file without its data passing through Python.

    `torch.save` under `skip_data` writes everything but the tensors' bytes, as a sparse file. Its records `data/0`,
    `data/1`, ... are the storages in the order in which pickling meets them. Their offsets are found once and kept
    while they fit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._signature: tuple[int, tuple[int, ...]] | None = None
        self._offsets: list[int] = []

    @staticmethod
    def warm_up() -> None:
        """Pay once for what torch loads at the first use."""
        TorchFileLayout("").image({"": torch.zeros(1)})

    def image(self, obj: object) -> FileImage:
        """The file that `torch.save(obj)` would write, with the tensors in `obj` left to be copied."""
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
                with skip_data(), _portable_tags():
                    torch.save(obj, path)
            finally:
                set_crc32_options(checksums)
            nbytes = os.fstat(fd).st_size
            signature = (nbytes, tuple(storages[key].nbytes() for key in order))
            if signature != self._signature:
                self._offsets = self._find_offsets(path, [storage.nbytes() for storage in storages.values()])
                self._signature = signature
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
        finally:
            os.close(fd)

    def _find_offsets(self, path: str, sizes: Sequence[int]) -> list[int]:
        """Where the bytes of each storage begin.

        Raises:
            ValueError: the file holds other storages than those that were found in the object.
        """
        records = storage_records(path)
        if [nbytes for _, nbytes in records] != list(sizes):
            raise ValueError(
                f"{self._name}: tensors may only lie in dicts, lists and tuples, else they cannot be saved"
            )
        return [offset for offset, _ in records]


def storage_records(file: Any) -> list[tuple[int, int]]:
    """Offset and size, in bytes, of every storage in a `torch.save` file, in the order in which pickling met them.

    Args:
        file: a path, or a binary file object.

    Raises:
        ValueError: their bytes are in another order than this machine's.
    """
    reader: Any = torch._C.PyTorchFileReader(file)
    if reader.has_record("byteorder") and reader.get_record("byteorder") != sys.byteorder.encode():
        raise ValueError(f"it was written on a machine of another byte order than {sys.byteorder} endian")
    # Its own word on sizes (get_record_size) is as new as torch 2.13. All names begin with the archive's.
    with zipfile.ZipFile(file) as archive:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
    records: list[tuple[int, int]] = []
    while (name := f"data/{len(records)}") in sizes:
        records.append((reader.get_record_offset(name), sizes[name]))
    return records


@dataclass(frozen=True)
class PlacedFile:
    """A file image and where it begins in the arena, in bytes; on a page, so that it can be written with O_DIRECT."""

    image: FileImage
    offset: int


def place(images: Sequence[FileImage]) -> tuple[list[PlacedFile], int]:
    """Lay images out one behind the other, each on a page; returns them and the bytes needed."""
    placed: list[PlacedFile] = []
    end = 0
    for image in images:
        placed.append(PlacedFile(image, end))
        end += round_up(max(image.nbytes, 1))
    return placed, max(end, PAGE_BYTES)


def layout_digest(images: Sequence[FileImage]) -> dict[str, str]:
    """By file, a digest of where its tensors are: equal on ranks that write parts of the same file."""
    return {
        image.name: hashlib.blake2b(
            repr((image.nbytes, [(offset, tensor.numel()) for offset, tensor in image.tensors])).encode(),
            digest_size=16,
        ).hexdigest()
        for image in images
    }


def shares(placed: Sequence[PlacedFile], share: int, num_shares: int) -> list[tuple[int, torch.Tensor]]:
    """What one of `num_shares` ranks copies: offset in the arena, and the bytes there.

    State that DDP replicates is equal on all ranks, so N ranks copy 1/N each (by bytes); what is a rank's own, it
    copies whole.
    """
    extents = [(file.offset + offset, tensor) for file in placed for offset, tensor in file.image.tensors]
    total = sum(tensor.numel() for _, tensor in extents)
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    found = []
    position = 0
    for offset, tensor in extents:
        first, last = max(begin - position, 0), min(end - position, tensor.numel())
        if first < last:
            found.append((offset + first, tensor[first:last]))
        position += tensor.numel()
    for file in placed:
        for offset, tensor in [*file.image.own, *(file.image.alone if share == 0 else ())]:
            if tensor.numel():
                found.append((file.offset + offset, tensor))
    return found


def copy_tensors(parts: Sequence[tuple[int, torch.Tensor]], buffer: memoryview, device: Device) -> None:
    """Copy `shares` into the arena; from an accelerator, enqueued on its current stream."""
    for offset, tensor in parts:
        device.copy(buffer, offset, tensor)


def pieces(image: FileImage, window: memoryview, device: Device) -> Iterator[memoryview]:
    """The file's bytes in order, through a small window of memory that is used again for every piece."""
    position = 0
    while position < image.nbytes:
        nbytes = min(len(window), image.nbytes - position)
        part = FileImage(image.name, nbytes)
        for offset, data in image.literals:
            first, last = max(position - offset, 0), min(position + nbytes - offset, len(data))
            if first < last:
                part.literals.append((offset + first - position, data[first:last]))
        for offset, tensor in [*image.tensors, *image.alone]:
            first, last = max(position - offset, 0), min(position + nbytes - offset, tensor.numel())
            if first < last:
                part.tensors.append((offset + first - position, tensor[first:last]))
        placed = [PlacedFile(part, 0)]
        copy_tensors(shares(placed, 0, 1), window, device)
        copy_literals(placed, window)
        device.mark().wait()
        yield window[:nbytes]
        position += nbytes


def fingerprint(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One int64 for each tensor: the wrapping sum of its bytes taken as 8-byte words. Replicas have equal ones.

    At memory speed, where the tensors are; any one changed value changes it.
    """
    sums = []
    for flat in tensors:
        words = flat.numel() // 8
        aligned = flat.data_ptr() % 8 == 0
        total = flat[: words * 8].view(torch.int64).sum() if aligned else flat[: words * 8].sum(dtype=torch.int64)
        sums.append(total + flat[words * 8 :].sum(dtype=torch.int64))
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    # Part of an optimizer's state may be on the host, and the device is waited for once.
    found = torch.empty(len(sums), dtype=torch.int64)
    for device in {total.device for total in sums}:
        numbers = [number for number, total in enumerate(sums) if total.device == device]
        found[numbers] = torch.stack([sums[number] for number in numbers]).cpu()
    return found


def freeze(obj: Any) -> Any:
    """The same containers anew around the same tensors: what is replaced in the original later is not replaced here."""
    # The training thread waits for this: a plain dict is told apart much faster than a Mapping.
    if isinstance(obj, dict):
        frozen = {key: freeze(value) for key, value in obj.items()}
        return frozen if type(obj) is dict else _like(obj, frozen)
    if isinstance(obj, torch.Tensor):
        return obj
    if isinstance(obj, list):
        return [freeze(value) for value in obj]
    if type(obj) is tuple:
        return tuple(freeze(value) for value in obj)
    if isinstance(obj, Mapping):
        return {key: freeze(value) for key, value in obj.items()}
    if isinstance(obj, np.generic):
        return _EXACT[type(obj)](obj) if type(obj) in _EXACT else obj
    return obj


def _like(obj: dict[Any, Any], frozen: dict[Any, Any]) -> dict[Any, Any]:
    """As another kind of dict is; one that can be made in no way that we know is refused when it is checked."""
    try:
        made = copy.copy(obj)
        # Not `update`, which a Counter takes as an addition.
        for key, value in frozen.items():
            made[key] = value
    except Exception:
        return obj
    return made


def check_readable(name: str, obj: object) -> None:
    """Read what is about to be promised with the reader that a resumption uses; tensors by type and shape alone.

    For the training thread: which classes that reader may build is a setting of the whole process, and other readers
    of the script's are there, too.

    Args:
        name: the checkpoint's file, for the message.

    Raises:
        CheckpointError: it cannot be read, or something in it is not what it was; the text has its path.
    """
    stem = name.partition(".")[0]
    fd = os.memfd_create("checkpoint-check", os.MFD_CLOEXEC)
    try:
        path_of_it = f"/proc/self/fd/{fd}"
        with torch.serialization.safe_globals(rng.SAFE_GLOBALS), skip_data():
            torch.save(obj, path_of_it)
            found = torch.load(path_of_it, map_location="cpu", weights_only=True)
    except Exception as error:
        path = _unreadable(obj, stem)
        if path is None:
            raise CheckpointError(f"{name} could not be read back: {type(error).__name__}: {error}") from None
        raise _refusal(*path) from None
    finally:
        os.close(fd)
    path = _not_the_same(obj, found, stem)
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


def _unreadable(obj: object, path: str) -> tuple[str, object] | None:
    """The innermost part that cannot be read back alone."""
    if isinstance(obj, torch.Tensor):
        return None if _is_plain(obj) else (path, obj)
    for step, value in _parts(obj):
        found = _unreadable(value, path + step)
        if found is not None:
            return found
    try:
        # Without what it holds, which can be read.
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


def _not_the_same(obj: object, found: object, path: str) -> tuple[str, object] | None:
    """The first part that is not as it was; None where all is."""
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
        return next((p for (step, a), (_, b) in pairs if (p := _not_the_same(a, b, path + step)) is not None), None)
    return None if obj == found or (obj != obj and found != found) else (path, obj)


def copy_literals(placed: Sequence[PlacedFile], buffer: memoryview) -> None:
    """Copy everything but the tensors into the arena."""
    for file in placed:
        for offset, data in file.image.literals:
            start = file.offset + offset
            buffer[start : start + len(data)] = data


def bytes_of(flat: torch.Tensor) -> torch.Tensor:
    """A tensor of one dimension as uint8, sharing its memory."""
    return flat.view(torch.uint8)


def tensors_in(obj: object) -> list[torch.Tensor]:
    """Tensors inside nested dicts, lists and tuples, in order."""
    found: list[torch.Tensor] = []
    _collect(obj, found)
    return found


def _collect(obj: object, found: list[torch.Tensor]) -> None:
    if isinstance(obj, torch.Tensor):
        found.append(obj)
    elif isinstance(obj, dict):
        for value in obj.values():
            _collect(value, found)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            _collect(value, found)
    elif isinstance(obj, Mapping):
        for value in obj.values():
            _collect(value, found)


def replaced(obj: Any, change: Callable[[Any], Any]) -> Any:
    """The same dicts, lists and tuples, with what `change` makes of everything in them.

    Raises:
        ValueError: a key holds a tensor: nobody's state does, and it could not be filled.
    """
    return _replaced(obj, change, {})


def _replaced(obj: Any, change: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """`done`: containers that were made already, by the identity of the old ones."""
    if id(obj) in done:
        return done[id(obj)]
    if isinstance(obj, dict):
        if any(_holds_tensor(key) for key in obj):
            raise ValueError("a key of a dict is a tensor")
        made: Any = {key: _replaced(value, change, done) for key, value in obj.items()}
        made = made if type(obj) is dict else type(obj)(made)
    elif type(obj) in (list, tuple):
        made = type(obj)(_replaced(value, change, done) for value in obj)
    else:
        return change(obj)
    done[id(obj)] = made
    return made


def _holds_tensor(key: Any) -> bool:
    return isinstance(key, torch.Tensor) or (isinstance(key, tuple) and any(map(_holds_tensor, key)))
