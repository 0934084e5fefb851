"""How a rank tells the supervisor what it does: datagrams that are dropped rather than waited for."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

# For what the supervisor must learn; its queue is short.
_PATIENCE_S = 2.0


class EventSender:
    """Never blocks for long and never fails: training must not depend on anybody listening."""

    def __init__(self, path: str, attempt: int = 0) -> None:
        self._path, self._attempt = path, attempt
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def send(self, event: str, **details: Any) -> None:
        """Say it, or drop it where nobody keeps up."""
        with contextlib.suppress(OSError):
            self._send(event, details)

    def send_surely(self, event: str, **details: Any) -> None:
        """Say it, and wait a moment for a place in the queue."""
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
        texts = {name: _utf8(value) for name, value in details.items() if isinstance(value, str)}
        message = {"event": event, "in_attempt": self._attempt, **details, **texts}
        self._sock.sendto(json.dumps(message).encode(), self._path)


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
