"""Free ports on loopback."""

from __future__ import annotations

import contextlib
import socket


def free_port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return that many different free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
