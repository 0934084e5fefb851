"""Small files kept with the checkpoints: the run's restart state, and what a supervisor keeps under other names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path

from checkpointing.storage.fence import parse_number


class Sidecars(ABC):
    """The sidecars of one location.

    The restart state is what a supervisor remembers of the run, so that the next one continues on any machine: a JSON
    object with a number `attempt`. Its contents mean nothing here. Every other sidecar has a name of letters, digits,
    dots, dashes and underscores that does not begin with a dot.
    """

    @abstractmethod
    def read_restart_state(self) -> bytes | None:
        """Return the restart state; None where there is none.

        Raises:
            OSError: Storage refused.
        """

    @abstractmethod
    def write_restart_state(self, data: bytes) -> None:
        """Replace the restart state; a crash leaves the old one or the new one.

        Raises:
            OSError: Storage refused.
        """

    def replace_restart_state(self, data: bytes) -> None:
        """Replace the restart state, unless a newer attempt has written the one that is there.

        Raises:
            OSError: Storage refused.
        """
        if attempt_of(self.read_restart_state()) <= attempt_of(data):
            self.write_restart_state(data)

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a sidecar, or replace it.

        Raises:
            OSError: Storage refused.
        """

    @property
    @abstractmethod
    def decides(self) -> bool:
        """Whether of several writers that `create` the same sidecar exactly one succeeds.

        Raises:
            OSError: Storage refused.
        """

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
        """Remove a sidecar, if there is one.

        Raises:
            OSError: Storage refused.
        """

    def write_part(self, name: str, path: Path, start: int, end: int) -> None:
        """Write bytes `start` to `end` of a file as a sidecar.

        Raises:
            OSError: Storage refused, or the file cannot be read.
        """
        with path.open("rb") as file:
            file.seek(start)
            self.write(name, file.read(end - start))

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a sidecar's bytes; none where it has been removed meanwhile.

        Raises:
            OSError: Storage refused.
        """

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the size in bytes of every sidecar whose name begins with `prefix`, by name, in order.

        Raises:
            OSError: Storage refused.
        """


def attempt_of(restart_state: bytes | None) -> int:
    """Return the attempt that wrote a restart state; -1 where it names none, so that a damaged one can be replaced."""
    try:
        return parse_number(json.loads(restart_state or b"{}")["attempt"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
