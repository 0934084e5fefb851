"""Checkpoints that a user has said to keep: no retention removes them.

Each has a sidecar `keep-<step>.json` at its location, so the manifest stays as it was committed, and releases that do
not know the sidecar read the checkpoint all the same. It has the checkpoint's identity: another one of that step, which
a run computes after it has gone back, is not kept.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable

from checkpointing.format.manifest import Manifest
from checkpointing.storage import Storage
from checkpointing.storage.base import NUMBER

_PREFIX = "keep-"
_NAME = re.compile(rf"{_PREFIX}({NUMBER})\.json")


def keep(storage: Storage, manifest: Manifest, label: str = "") -> None:
    """Keep a checkpoint of a storage, or change its label.

    Raises:
        OSError: Storage refused.
    """
    data = json.dumps({"label": label, "kept_at": time.time(), "identity": manifest.identity}).encode()
    storage.sidecars.write(_name(manifest.step), data)


def unkeep(storage: Storage, step: int) -> None:
    """Leave a checkpoint to retention again.

    Raises:
        OSError: Storage refused.
    """
    storage.sidecars.remove(_name(step))


def kept_steps(storage: Storage) -> set[int]:
    """Return the steps of which a checkpoint was kept, whether or not it is there.

    Raises:
        OSError: Storage refused.
    """
    return {int(match.group(1)) for name in storage.sidecars.sizes(_PREFIX) if (match := _NAME.fullmatch(name))}


def kept_of(storage: Storage, manifests: Iterable[Manifest]) -> set[int]:
    """Return the steps of those among a storage's checkpoints that are kept.

    Raises:
        OSError: Storage refused.
    """
    return set(labels(storage, manifests))


def remove_unless_kept(storage: Storage, manifest: Manifest) -> bool:
    """Remove a checkpoint, unless a user keeps it: that may have been said since retention was decided, minutes ago.

    Returns:
        Whether it was removed.

    Raises:
        OSError: Storage refused.
    """
    if kept_of(storage, [manifest]):
        return False
    storage.remove(manifest.step)
    return True


def labels(storage: Storage, manifests: Iterable[Manifest]) -> dict[int, str]:
    """Return the label of each of a storage's checkpoints that is kept, by its step.

    Where the sidecar cannot be understood, the checkpoint is kept, and the label is empty.

    Raises:
        OSError: Storage refused.
    """
    named, found = kept_steps(storage), {}
    for manifest in manifests:
        if manifest.step in named:
            record = _parsed(storage.sidecars.read(_name(manifest.step)))
            if record.get("identity", manifest.identity) == manifest.identity:
                found[manifest.step] = record.get("label", "")
    return found


def _name(step: int) -> str:
    return f"{_PREFIX}{step}.json"


def _parsed(data: bytes) -> dict[str, str]:
    """Return the texts of a sidecar."""
    try:
        return {key: value for key, value in json.loads(data).items() if isinstance(value, str)}
    except (ValueError, AttributeError, RecursionError):
        return {}
