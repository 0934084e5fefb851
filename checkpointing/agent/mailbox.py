"""Results of other threads for an event loop, which wakes up when there are some."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue whose `fileno` is readable while there may be something to take."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._receiver.fileno()

    @property
    def wakeup_fd(self) -> int:
        """What to give to `signal.set_wakeup_fd`, so that a signal wakes up the loop, whichever thread receives it."""
        return self._sender.fileno()

    def post(self, item: T) -> None:
        """Add an item and wake up the loop; any thread may call this."""
        self._waiting.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake up the loop; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            self._sender.send(b"x")

    def take(self) -> Iterator[T]:
        """Yield what was posted, oldest first, also what is posted meanwhile."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
        while self._waiting:
            yield self._waiting.popleft()
