"""Where checkpoints are kept. `Storage` is the seam; `open_storage` picks the back end that a location names.

A back end is a module with a function `open_location(location) -> Storage`, and a line of `BACK_ENDS`. It is imported
when a location names its scheme, and answers every question about itself: no other code asks for its type. Back ends
for object stores need only the calls of `checkpointing.storage.object_store.ObjectStore`.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from checkpointing.host.environment import not_installed
from checkpointing.storage.base import Storage, Transaction
from checkpointing.storage.local import LocalStorage

__all__ = ["BACK_ENDS", "BackEnd", "LocalStorage", "Storage", "Transaction", "open_storage"]


class BackEnd(NamedTuple):
    """A module that opens locations.

    Attributes:
        module: Its name.
        extra: The optional part of this distribution that installs the packages it imports; None if it needs none.
    """

    module: str
    extra: str | None = None


# By URL scheme; a location without a scheme is a directory.
BACK_ENDS = {
    "": BackEnd("checkpointing.storage.local"),
    "file": BackEnd("checkpointing.storage.local"),
    "s3": BackEnd("checkpointing.storage.s3", extra="s3"),
}
# Every other scheme.
_FSSPEC = BackEnd("checkpointing.storage.fsspec_store", extra="s3")


def open_storage(location: str) -> Storage:
    """Open the storage at a path or a URL (`file://`, `s3://`, or another that fsspec knows). Connects to nothing yet.

    Raises:
        ValueError: The scheme is unknown, the back end's package is missing, or the location is unusable.
    """
    scheme, separator, _ = location.partition("://")
    back_end = BACK_ENDS.get(scheme if separator else "", _FSSPEC)
    try:
        storage: Storage = importlib.import_module(back_end.module).open_location(location)
    except ModuleNotFoundError as error:
        if back_end.extra is None:
            raise
        raise ValueError(f"checkpoint.location {location!r}: {not_installed(error.name, back_end.extra)}") from None
    return storage
