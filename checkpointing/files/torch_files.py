"""Lays objects out as `torch.save` files, and finds the tensors' bytes in such files."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from checkpointing.files.file_images import FileImage
from checkpointing.process.trees import tensors_in


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
    """Makes images of one `torch.save` file without passing the tensors' bytes through Python.

    Under `skip_data`, `torch.save` writes a sparse file with everything but the tensors' bytes. Its records `data/0`,
    `data/1`, ... are the storages, in the order in which pickling meets them. Their offsets are looked up once and
    reused while the sizes stay the same.

    Args:
        name: File name inside the checkpoint.
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
        """Return where the bytes of each storage begin.

        Raises:
            ValueError: The file holds other storages than those that were found in the object.
        """
        records = storage_records(path)
        if [nbytes for _, nbytes in records] != list(sizes):
            raise ValueError(
                f"{self._name}: a tensor is inside another object, where it cannot be found; keep tensors in dicts, "
                "lists and tuples only"
            )
        return [offset for offset, _ in records]


def storage_records(file: Any) -> list[tuple[int, int]]:
    """Return offset and size, in bytes, of every storage in a `torch.save` file, in the order of pickling.

    Args:
        file: A path, or a binary file object.

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
