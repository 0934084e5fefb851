"""Threads that handle tasks in the order in which they are put, among them the one that writes sidecars."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Generic, TypeVar

from checkpointing.agent.events import RestartStateFailed
from checkpointing.agent.reporting import Report, text_of
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.storage.sidecars import Sidecars

T = TypeVar("T")


class _End(Enum):
    END = "end"


class TaskThread(Generic[T]):
    """A daemon thread with a queue of tasks. A test may call `run_pending` instead of `start`."""

    def __init__(self, name: str, handle: Callable[[list[T]], None]) -> None:
        """Create the thread; it does not run yet.

        Args:
            name: Name of the thread.
            handle: Called with all tasks that are waiting, in order; at the end once more, even with none.
        """
        self._handle = handle
        self._tasks: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, task: T) -> None:
        """Add a task; any thread may call this."""
        self._tasks.put(task)

    @property
    def has_waiting(self) -> bool:
        """Whether a task has not been begun yet."""
        return not self._tasks.empty()

    def close(self) -> None:
        """Wait until all tasks that were put have been handled, and end the thread."""
        self._tasks.put(_End.END)
        self._thread.join()

    def run_pending(self) -> None:
        """Handle the waiting tasks in the calling thread."""
        while not self._tasks.empty():
            self._handle_waiting()

    def _run(self) -> None:
        while self._handle_waiting():
            pass

    def _handle_waiting(self) -> bool:
        waiting = [self._tasks.get()]
        while not self._tasks.empty():
            waiting.append(self._tasks.get())
        self._handle([task for task in waiting if not isinstance(task, _End)])
        return _End.END not in waiting


def one_by_one(handle: Callable[[T], None]) -> Callable[[list[T]], None]:
    """Return a handler of waiting tasks that handles each by itself."""

    def handle_all(tasks: list[T]) -> None:
        for task in tasks:
            handle(task)

    return handle_all


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
