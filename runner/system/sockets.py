"""Sockets that other nodes connect to."""

from __future__ import annotations

import socket


def listening(bind: str | None, port: int) -> socket.socket:
    """Return a socket that listens on an address or host name of this machine; None: on all, of IPv4 and of IPv6.

    A port of 0 is a free one. Raises OSError if it cannot.
    """
    if bind is not None:
        family, _, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
