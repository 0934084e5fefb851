"""What a run computes once (tokenizer, tokenised data), and how it is kept from going on with half of it.

The libraries that write there rename files that are not durable yet: after a power cut they have their names, and no
content. So whatever is there is made durable and then listed, and what is not on the list does not survive a start.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from checkpointing.storage.durable import fsync_tree, replace_file

_LIST_NAME = "sealed.json"
_TEMPORARY_NAME = f".{_LIST_NAME}.tmp"


def seal(cache: Path) -> None:
    """Make everything in it durable, and say so; where that cannot be done, it is computed again after a start."""
    sizes = _sizes(cache)
    if sizes == _sealed(cache):
        return
    # A full disk, or another rank's temporary file that has just gone.
    with contextlib.suppress(OSError):
        fsync_tree(cache)
        replace_file(cache / _LIST_NAME, json.dumps(sizes).encode(), cache / _TEMPORARY_NAME)


def discard_unsealed(cache: Path) -> None:
    """Remove what may be torn; it will be computed again."""
    sealed = _sealed(cache)
    for name, size in _sizes(cache).items():
        if sealed.get(name) != size:
            with contextlib.suppress(OSError):
                (cache / name).unlink()
    for folder, _, _ in os.walk(cache, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            Path(folder).rmdir()


def _sizes(cache: Path) -> dict[str, int]:
    """Of every file there, by its path."""
    found = {}
    for folder, _, files in os.walk(cache):
        for name in files:
            path = Path(folder) / name
            with contextlib.suppress(OSError):
                found[str(path.relative_to(cache))] = path.lstat().st_size
    return {name: size for name, size in found.items() if name not in (_LIST_NAME, _TEMPORARY_NAME)}


def _sealed(cache: Path) -> dict[str, int]:
    try:
        listed = json.loads((cache / _LIST_NAME).read_text())
        return {str(name): int(size) for name, size in listed.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
