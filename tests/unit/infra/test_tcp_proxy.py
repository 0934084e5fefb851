"""The proxy before a small server: what it forwards, and each of its faults."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from infra.tcp_proxy import Faults, TcpProxy, tcp_proxy


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    """Before a server that answers each line with the same line."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        with tcp_proxy(server.getsockname()[1]) as proxy:
            yield proxy
        server.shutdown(socket.SHUT_RDWR)


def echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            pass


def ask(proxy: TcpProxy, data: bytes, timeout_s: float = 5) -> bytes:
    """Send bytes and return what comes back until there are as many, or the end."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout_s) as connection:
        connection.sendall(data)
        received = b""
        while len(received) < len(data) and (more := connection.recv(1 << 16)):
            received += more
        return received


def test_it_forwards_and_counts(proxy: TcpProxy) -> None:
    assert ask(proxy, b"hello") == b"hello"
    assert (proxy.traffic.connections, proxy.traffic.up, proxy.traffic.down) == (1, 5, 5)


def test_a_line_may_be_slow(proxy: TcpProxy) -> None:
    proxy.faults = Faults(latency_ms=50)
    began = time.monotonic()
    assert ask(proxy, b"hello") == b"hello" and time.monotonic() - began >= 0.1
    proxy.faults = Faults(rate_bps=10_000)
    began = time.monotonic()
    assert ask(proxy, bytes(1000)) == bytes(1000) and time.monotonic() - began >= 0.2


def test_connections_are_reset(proxy: TcpProxy) -> None:
    proxy.faults = Faults(cut_after=3)
    with pytest.raises(ConnectionError):
        ask(proxy, b"hello")
    assert proxy.traffic.cut == 1
    proxy.faults = Faults(refuse=True)
    with pytest.raises(ConnectionError):
        ask(proxy, b"hello")


def test_a_silent_line_delivers_when_the_fault_is_gone(proxy: TcpProxy) -> None:
    proxy.faults = Faults(blackhole=True)
    with pytest.raises(TimeoutError):
        ask(proxy, b"hello", timeout_s=0.1)
    proxy.faults = Faults()
    assert ask(proxy, b"again") == b"again"


def test_so_many_requests_that_match_are_answered_with_503(proxy: TcpProxy) -> None:
    proxy.faults = Faults(http503=1, match="/bucket")
    assert ask(proxy, b"PUT /other HTTP/1.1\r\n\r\n").startswith(b"PUT /other")
    assert ask(proxy, b"PUT /bucket HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503")
    assert ask(proxy, b"PUT /bucket HTTP/1.1\r\n\r\n").startswith(b"PUT /bucket")
    assert proxy.traffic.busy == 1


def test_it_ends_without_a_connection_and_with_one() -> None:
    with tcp_proxy(9):
        pass
    with tcp_proxy(9) as proxy, socket.create_connection(("127.0.0.1", proxy.port)):
        pass
    with pytest.raises(ConnectionError):
        ask(proxy, b"hello")
