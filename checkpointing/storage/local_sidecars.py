"""Small records of a run next to its checkpoints, on a local disk or a mounted volume."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from checkpointing.storage.durable import create_file, replace_file
from checkpointing.storage.sidecars import Sidecars

RESTART_STATE_NAME = ".runner.json"
_SIDECARS_NAME = ".records"


class LocalSidecars(Sidecars):
    """See `Sidecars`. The restart state is `.runner.json`, all others are in `.records`."""

    def __init__(self, root: Path, may_create: Callable[[], bool]) -> None:
        """Create sidecars.

        Args:
            root: Directory of the storage.
            may_create: Whether a missing directory may be created by a sidecar.
        """
        self._root, self._may_create = root, may_create

    def read_restart_state(self) -> bytes | None:
        """Read `.runner.json`."""
        try:
            return (self._root / RESTART_STATE_NAME).read_bytes()
        except FileNotFoundError:
            return None

    def write_restart_state(self, data: bytes) -> None:
        """Replace `.runner.json`; never in a new directory, as the checkpoints may have been moved away with theirs."""
        replace_file(self._root / RESTART_STATE_NAME, data, self._root / f"{RESTART_STATE_NAME}.{os.getpid()}.tmp")

    def write(self, name: str, data: bytes) -> None:
        """Replace a file durably."""
        folder = self._root / _SIDECARS_NAME
        folder.mkdir(parents=self._may_create(), exist_ok=True)
        replace_file(folder / name, data, folder / f".{name}.tmp")

    @property
    def decides(self) -> bool:
        """Return True: link(2) decides."""
        return True

    def create(self, name: str, data: bytes) -> bool:
        """Link a file durably."""
        folder = self._root / _SIDECARS_NAME
        folder.mkdir(parents=self._may_create(), exist_ok=True)
        return create_file(folder / name, data, folder / f".{name}.{uuid.uuid4().hex}.tmp")

    def remove(self, name: str) -> None:
        """Unlink a file."""
        (self._root / _SIDECARS_NAME / name).unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Read a file."""
        try:
            return (self._root / _SIDECARS_NAME / name).read_bytes()
        except FileNotFoundError:
            return b""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """List the files."""
        try:
            paths = sorted((self._root / _SIDECARS_NAME).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        paths = [path for path in paths if path.name.startswith(prefix) and path.name[0] != "."]
        return {path.name: path.stat().st_size for path in paths}
