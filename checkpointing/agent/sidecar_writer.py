"""Writes the run's restart state and other sidecars at the durable tier, while storage comes and goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from checkpointing.agent.events import RestartStateFailed
from checkpointing.agent.reporting import text_of
from checkpointing.agent.results import Report
from checkpointing.agent.tasks import TaskThread
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.storage.sidecars import Sidecars

# Under which the restart state is owed; no sidecar has that name.
_RESTART_STATE = ""


class SidecarWriter:
    """What storage refuses is owed, and tried again with the next write; of each name only the newest.

    Attributes:
        thread: Handles its tasks.
    """

    def __init__(
        self, sidecars: Sidecars, tier: str, report: Report, flush_retries: Callable[[], None] = lambda: None
    ) -> None:
        """Create a writer.

        Args:
            sidecars: Where.
            tier: Name of that tier in events.
            report: Takes its events.
            flush_retries: Called after each round of writes.
        """
        self._sidecars, self._tier, self._report, self._flush_retries = sidecars, tier, report, flush_retries
        self._owed: dict[str, Callable[[], None]] = {}
        self.thread: TaskThread[tuple[str, Callable[[], None]]] = TaskThread("checkpoint-sidecars", self._write)

    def replace_restart_state(self, text: str) -> None:
        """Write the restart state, unless a newer attempt has written one."""
        self.thread.put((_RESTART_STATE, functools.partial(self._sidecars.replace_restart_state, text.encode())))

    def write(self, name: str, data: bytes) -> None:
        """Write a sidecar."""
        self.thread.put((name, functools.partial(self._sidecars.write, name, data)))

    def write_part(self, name: str, path: Path, start: int, end: int) -> None:
        """Write bytes `start` to `end` of a file as a sidecar."""
        self.thread.put((name, functools.partial(self._sidecars.write_part, name, path, start, end)))

    def _write(self, tasks: list[tuple[str, Callable[[], None]]]) -> None:
        self._owed |= dict(tasks)
        for name, write in list(self._owed.items()):
            try:
                write()
                del self._owed[name]
            except Exception as error:
                self._report(RestartStateFailed(tier=self._tier, error=text_of(error)), None)
                if isinstance(error, StorageTimeout):
                    break  # The next one would get no answer either.
        self._flush_retries()
