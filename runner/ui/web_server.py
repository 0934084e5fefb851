"""A small web server that strangers cannot exhaust: for metrics, and for reports that are served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

# A stranger that opens connections must not take the descriptors of the runner.
_MOST_CONNECTIONS = 16
_SILENCE_S = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the console is the run's."""


class _Server(ThreadingMixIn, WSGIServer):
    """Has a thread for each connection, and closes those that are too many."""

    daemon_threads = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, if there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread could be started.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client went away, or said nothing."""


class _ServerOverIpv6(_Server):
    address_family = socket.AF_INET6


def web_server(address: str, port: int, application: Callable[..., Iterable[bytes]]) -> WSGIServer:
    """Return a server of a WSGI application that listens, and serves once it is called; OSError if it cannot listen."""
    kind = _ServerOverIpv6 if ":" in address else _Server
    return make_server(address, port, application, kind, _Handler)
