"""A directory that others may remove, move or unmount."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class WatchedDirectory:
    """Tells a directory that was removed from one that was moved, or whose volume is not there."""

    def __init__(self, path: Path) -> None:
        """Hold the directory, if there is one: its volume cannot be unmounted meanwhile but lazily."""
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def is_held(self) -> bool:
        """Whether there was a directory."""
        return self._fd >= 0

    @property
    def was_removed(self) -> bool:
        """Whether no name leads to it any more. Over NFS, where a server does not know, it was not."""
        try:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        except OSError:
            return False
