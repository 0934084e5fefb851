"""Checkpoint files written from their images, as snapshots write them."""

from __future__ import annotations

from pathlib import Path

from checkpointing.files.file_images import FileImage, copy_literals, copy_tensors, place, placed_literals, shares
from checkpointing.process.device import HostDevice


def materialise(images: list[FileImage], folder: Path, num_shares: int = 1) -> None:
    placed, nbytes = place(images)
    buffer = memoryview(bytearray(nbytes))
    for share in range(num_shares):
        copy_tensors(shares(placed, share, num_shares), buffer, HostDevice())
    copy_literals(placed_literals(placed), buffer)
    for file in placed:
        (folder / file.image.name).write_bytes(buffer[file.offset : file.offset + file.image.nbytes])
