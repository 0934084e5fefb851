"""Events from a rank to the supervisor, as datagrams that are dropped rather than waited for."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from runner.recovery.classify import printable

# Seconds that `send_surely` waits for space in the supervisor's short queue.
_PATIENCE_S = 2.0


class EventSender:
    """Sends events. It never blocks for long and never fails, so training does not depend on the receiver."""

    def __init__(self, path: str, attempt: int = 0) -> None:
        """Prepare the socket.

        Args:
            path: Path of the receiver's socket.
            attempt: Number of the attempt.
        """
        self._path, self._attempt = path, attempt
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def send(self, event: str, **details: Any) -> None:
        """Send an event, or drop it if the queue is full.

        Args:
            event: Name of the event.
            details: Its other fields.
        """
        with contextlib.suppress(OSError):
            self._send(event, details)

    def send_surely(self, event: str, **details: Any) -> None:
        """Send an event, waiting a moment for space in the queue.

        Args:
            event: Name of the event.
            details: Its other fields.
        """
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):
            while True:
                try:
                    return self._send(event, details)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(0.001)

    def _send(self, event: str, details: dict[str, Any]) -> None:
        # An exception's text may quote a name that is not UTF-8.
        texts = {name: printable(value) for name, value in details.items() if isinstance(value, str)}
        message = {"event": event, "in_attempt": self._attempt, **details, **texts}
        self._sock.sendto(json.dumps(message).encode(), self._path)
