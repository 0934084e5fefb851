"""Files and folders that survive a power cut: fsync and atomic replacement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make all files below a folder, and their names, durable."""
    for parent, _, files in os.walk(folder):
        for name in files:
            descriptor = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(parent))


def replace_file(path: Path, data: bytes, temporary: Path, written: Callable[[], object] = lambda: None) -> None:
    """Replace a small file durably; a crash leaves the old contents or the new ones.

    Args:
        path: The file.
        data: Its new contents.
        temporary: Another name in the same directory that no other writer uses.
        written: Called when the new contents are durable under that name.

    Raises:
        OSError: The disk refused; the old contents are still there.
    """
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written()
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_file(path: Path, data: bytes, temporary: Path) -> bool:
    """Create a small file durably, whole or not at all, unless there is one of that name.

    The name is given by link(2), which of several writers exactly one can do, also over NFS.

    Args:
        path: The file.
        data: Its contents.
        temporary: Another name in the same directory that no other writer uses.

    Returns:
        Whether the file has these contents now.

    Raises:
        OSError: The disk refused.
    """
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    # Over NFS a link may have been made whose answer was lost, and which the repeated call then finds.
    return path.read_bytes() == data
