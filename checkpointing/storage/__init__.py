"""Where checkpoints are kept. `Storage` is the seam; `open_storage` picks the one that a location names."""

from __future__ import annotations

from pathlib import Path

from checkpointing.storage.base import Storage, Transaction
from checkpointing.storage.local import LocalStorage

__all__ = ["LocalStorage", "Storage", "Transaction", "open_storage"]


def open_storage(location: str) -> Storage:
    """The storage at a path or `file://` URL.

    Raises:
        ValueError: the URL scheme is not supported.
    """
    if "://" in location:
        scheme, _, rest = location.partition("://")
        if scheme != "file":
            raise ValueError(
                f"checkpoint.location {location!r}: scheme {scheme!r} is not supported; use a path or file://"
            )
        location = rest
    return LocalStorage(Path(location))
