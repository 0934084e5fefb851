"""Threads that handle tasks in the order in which they are put."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

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
