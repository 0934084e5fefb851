"""The cache of what a run computes once (tokenizer, tokenised data), protected against incomplete files.

The libraries that write to it rename files that are not durable yet, so a power cut can leave files with a name but
without their content. Therefore the cache is made durable and then listed; a start removes files that are not listed.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

from checkpointing.storage.durable import fsync_tree, replace_file

_LIST_NAME = "sealed.json"


def seal(cache: Path) -> None:
    """Make all files of a cache durable and list them. If that fails, they are recomputed after the next start."""
    sizes = _sizes(cache)
    if sizes == _sealed(cache):
        return
    # The disk may be full, or another rank may just have removed a temporary file.
    with contextlib.suppress(OSError):
        fsync_tree(cache)
        # Nodes may share the folder. A temporary file that is left is on no list.
        replace_file(cache / _LIST_NAME, json.dumps(sizes).encode(), cache / f".{_LIST_NAME}.{uuid.uuid4().hex}.tmp")


def is_sealed(cache: Path) -> bool:
    """Return whether a cache has been filled once."""
    return (cache / _LIST_NAME).exists()


def discard_unsealed(cache: Path) -> None:
    """Remove files that are not listed with their size; they will be recomputed."""
    sealed = _sealed(cache)
    for name, size in _sizes(cache).items():
        if sealed.get(name) != size:
            with contextlib.suppress(OSError):
                (cache / name).unlink()
    for folder, _, _ in os.walk(cache, topdown=False):
        with contextlib.suppress(OSError):  # The folder is not empty.
            Path(folder).rmdir()


def _sizes(cache: Path) -> dict[str, int]:
    """Return the size of every file in bytes, by relative path."""
    found = {}
    for folder, _, files in os.walk(cache):
        for name in files:
            path = Path(folder) / name
            with contextlib.suppress(OSError):
                found[str(path.relative_to(cache))] = path.lstat().st_size
    return {name: size for name, size in found.items() if name != _LIST_NAME}


def _sealed(cache: Path) -> dict[str, int]:
    try:
        listed = json.loads((cache / _LIST_NAME).read_text())
        return {str(name): int(size) for name, size in listed.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
