"""Where checkpoints are kept. `Storage` is the seam; `open_storage` picks the one that a location names."""

from __future__ import annotations

from pathlib import Path

from checkpointing.extras import not_installed
from checkpointing.storage.base import Storage, Transaction
from checkpointing.storage.local import LocalStorage

__all__ = ["LocalStorage", "Storage", "Transaction", "open_storage"]


def open_storage(location: str) -> Storage:
    """The storage at a path, `file://`, `s3://`, or other fsspec URL. Talks to nobody yet.

    Raises:
        ValueError: nobody knows the URL's scheme, its package is missing, or its settings are no use.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return LocalStorage(Path(location))
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError(f"location {location!r} is not allowed: write file:///path, with three slashes")
        return LocalStorage(Path(rest))
    # Only who needs them pays for these imports.
    from checkpointing.storage.object_storage import RemoteStorage

    if scheme == "s3":
        try:
            from checkpointing.storage.s3 import S3Store
        except ModuleNotFoundError as error:
            raise ValueError(f"checkpoint.location {location!r}: {not_installed(error.name, 's3')}") from None

        return RemoteStorage(S3Store(location))
    from checkpointing.storage.fsspec_store import FilesystemStore

    return RemoteStorage(FilesystemStore(location))
