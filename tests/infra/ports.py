"""Free ports on loopback, which nothing else takes before they are used."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

# Ports for each worker of `pytest -n`.
_SHARE = 2000
# The kernel gives ports from here on to outgoing connections: one that was free a moment ago may be taken.
_EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_SHARES = max(1, (_EPHEMERAL - 10_000) // _SHARE)


def free_port() -> int:
    """Return a free port; the one after it is free, too, as a runner uses both."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return that many different free ports; the one after each is free, too."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    first = _EPHEMERAL - (worker + 1) * _SHARE
    # Other runs of the tests may draw from the same share.
    drawn = iter(random.SystemRandom().sample(range(first, first + _SHARE, 2), _SHARE // 2))
    found: list[int] = []
    while len(found) < number:
        port = next(drawn)
        if _is_free(port) and _is_free(port + 1):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False
