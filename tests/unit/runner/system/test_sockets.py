"""Listening sockets, on one address and on all."""

from __future__ import annotations

import socket

import pytest

from runner.system.sockets import listening


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("bind", "elsewhere"), [("127.0.0.1", False), ("localhost", False), (None, True)])
def test_only_the_address_that_was_given_is_listened_on(bind: str | None, elsewhere: bool) -> None:
    with listening(bind, 0) as server:
        port = server.getsockname()[1]
        assert reachable("localhost", port)
        assert reachable("127.0.0.2", port) is elsewhere


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError):
        listening("192.0.2.1", 0)


def test_a_port_in_use_is_refused() -> None:
    with listening("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listening("127.0.0.1", first.getsockname()[1])
