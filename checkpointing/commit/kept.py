"""Checkpoints that a user has said to keep: no retention removes them.

Each has a sidecar `keep-<step>.json` at its location, so the manifest stays as it was committed, and releases that do
not know the sidecar read the checkpoint all the same.
"""

from __future__ import annotations

import json
import re
import time

from checkpointing.storage import Storage
from checkpointing.storage.base import NUMBER

_PREFIX = "keep-"
_NAME = re.compile(rf"{_PREFIX}({NUMBER})\.json")


def keep(storage: Storage, step: int, label: str = "") -> None:
    """Keep a checkpoint of a storage, or change its label.

    Raises:
        OSError: Storage refused.
    """
    data = json.dumps({"label": label, "kept_at": time.time()}).encode()
    storage.sidecars.write(f"{_PREFIX}{step}.json", data)


def unkeep(storage: Storage, step: int) -> None:
    """Leave a checkpoint to retention again.

    Raises:
        OSError: Storage refused.
    """
    storage.sidecars.remove(f"{_PREFIX}{step}.json")


def kept_steps(storage: Storage) -> set[int]:
    """Return the steps that are kept, whether or not there are checkpoints of them.

    Raises:
        OSError: Storage refused.
    """
    return {int(match.group(1)) for name in storage.sidecars.sizes(_PREFIX) if (match := _NAME.fullmatch(name))}


def remove_unless_kept(storage: Storage, step: int) -> bool:
    """Remove a checkpoint, unless a user keeps it: that may have been said since retention was decided, minutes ago.

    Returns:
        Whether it was removed.

    Raises:
        OSError: Storage refused.
    """
    if step in kept_steps(storage):
        return False
    storage.remove(step)
    return True


def labels(storage: Storage) -> dict[int, str]:
    """Return the label of each step that is kept; an empty one also where the sidecar cannot be understood.

    Raises:
        OSError: Storage refused.
    """
    return {step: _label(storage.sidecars.read(f"{_PREFIX}{step}.json")) for step in sorted(kept_steps(storage))}


def _label(data: bytes) -> str:
    try:
        found = json.loads(data)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
