"""How a rank tells the supervisor what it does: datagrams that are dropped rather than waited for."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any


class EventSender:
    """Never blocks and never fails: training must not depend on anybody listening."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def send(self, event: str, **details: Any) -> None:
        with contextlib.suppress(OSError):
            self._sock.sendto(json.dumps({"event": event, **details}).encode(), self._path)
