"""Small files kept with the checkpoints: the run's restart state, and what a supervisor keeps under other names."""

from __future__ import annotations

import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from checkpointing.host.own_files import check_own_folder
from checkpointing.storage.durable import create_file, replace_file
from checkpointing.storage.fence import parse_number
from checkpointing.storage.object_store import ObjectStore

LOCAL_RESTART_STATE = ".runner.json"
_LOCAL_FOLDER = ".records"
_RESTART_STATE = "runner.json"
_FOLDER = "records/"


class Sidecars(ABC):
    """The sidecars of one location. Every call that reaches it raises OSError where the storage refuses.

    The restart state is what a supervisor remembers of the run, so that the next one continues on any machine: a JSON
    object with a number `attempt`. Its contents mean nothing here. Every other sidecar has a name of letters, digits,
    dots, dashes and underscores that does not begin with a dot.
    """

    @abstractmethod
    def read_restart_state(self) -> bytes | None:
        """Return the restart state; None where there is none."""

    @abstractmethod
    def write_restart_state(self, data: bytes) -> None:
        """Replace the restart state; a crash leaves the old one or the new one."""

    def replace_restart_state(self, data: bytes) -> None:
        """Replace the restart state, unless a newer attempt has written the one that is there."""
        if attempt_of(self.read_restart_state()) <= attempt_of(data):
            self.write_restart_state(data)

    @abstractmethod
    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Write a sidecar, or replace it; nobody else is to read a `private` one, where storage has modes of files."""

    @property
    @abstractmethod
    def decides(self) -> bool:
        """Whether of several writers that `create` the same sidecar exactly one succeeds."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a sidecar if there is none of that name.

        Returns:
            Whether there is one with these bytes now; also if an earlier call has written it and its answer was lost.

        Raises:
            OSError: Storage refused, or did not answer: the call may still take effect.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a sidecar, if there is one."""

    def write_part(self, name: str, path: Path, start: int, end: int) -> None:
        """Write bytes `start` to `end` of a file as a sidecar."""
        with path.open("rb") as file:
            file.seek(start)
            self.write(name, file.read(end - start))

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a sidecar's bytes; none where it has been removed meanwhile."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the size in bytes of every sidecar whose name begins with `prefix`, by name, in order."""


class LocalSidecars(Sidecars):
    """Files in a directory: the restart state is `.runner.json`, all others are in `.records`.

    Args:
        root: Directory of the storage.
        may_create: Whether a missing directory may be created by a sidecar. The restart state never is in a new one,
            as the checkpoints may have been moved away with theirs.
    """

    def __init__(self, root: Path, may_create: Callable[[], bool]) -> None:
        self._restart_state, self._folder = root / LOCAL_RESTART_STATE, root / _LOCAL_FOLDER
        self._may_create = may_create

    def read_restart_state(self) -> bytes | None:
        """Read `.runner.json`."""
        try:
            return self._restart_state.read_bytes()
        except FileNotFoundError:
            return None

    def write_restart_state(self, data: bytes) -> None:
        """Replace `.runner.json`."""
        path = self._restart_state
        replace_file(path, data, path.with_name(f"{path.name}.{os.getpid()}.tmp"))

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Replace a file durably."""
        self._make_folder()
        replace_file(self._folder / name, data, self._folder / f".{name}.tmp", private=private)

    @property
    def decides(self) -> bool:
        """Return True: link(2) decides."""
        return True

    def create(self, name: str, data: bytes) -> bool:
        """Link a file durably."""
        self._make_folder()
        return create_file(self._folder / name, data, self._folder / f".{name}.{uuid.uuid4().hex}.tmp")

    def _make_folder(self) -> None:
        # Users who may read the checkpoints may list them, which looks here.
        self._folder.mkdir(parents=self._may_create(), exist_ok=True)
        check_own_folder(self._folder)

    def remove(self, name: str) -> None:
        """Unlink a file."""
        (self._folder / name).unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Read a file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return b""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """List the files."""
        try:
            paths = sorted(self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        paths = [path for path in paths if path.name.startswith(prefix) and path.name[0] != "."]
        return {path.name: path.stat().st_size for path in paths}


class ObjectSidecars(Sidecars):
    """Objects: the restart state is `runner.json`, all others are below `records/`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read_restart_state(self) -> bytes | None:
        """Get `runner.json`."""
        return self._store.get(_RESTART_STATE)

    def write_restart_state(self, data: bytes) -> None:
        """Put `runner.json`."""
        self._store.put(_RESTART_STATE, data)

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Put an object."""
        self._store.put(_FOLDER + name, data)

    @property
    def decides(self) -> bool:
        """Return whether the server decides."""
        return self._store.honours_if_absent

    def create(self, name: str, data: bytes) -> bool:
        """Put an object, and get it: an earlier put may have been carried out without an answer."""
        self._store.put(_FOLDER + name, data, if_absent=True)
        return self._store.get(_FOLDER + name) == data

    def remove(self, name: str) -> None:
        """Delete an object."""
        self._store.delete([_FOLDER + name])

    def read(self, name: str) -> bytes:
        """Get an object."""
        return self._store.get(_FOLDER + name) or b""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """List the objects."""
        found = sorted(self._store.sizes(_FOLDER + prefix).items())
        return {key.removeprefix(_FOLDER): size for key, size in found}


def attempt_of(restart_state: bytes | None) -> int:
    """Return the attempt that wrote a restart state; -1 where it names none, so that a damaged one can be replaced."""
    try:
        return parse_number(json.loads(restart_state or b"{}")["attempt"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
