"""A webhook's receiver, on a real port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Attributes:
    url: its address.
    requests: headers, by lower-case name, and body of each request.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/hooks/t0ken"
        self.requests: list[tuple[dict[str, str], bytes]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.messages]


def answer(status: int) -> Callable[[BaseHTTPRequestHandler, int], None]:
    """Answer every request with a status."""

    def send(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(status)
        handler.send_header("content-length", "0")
        handler.end_headers()

    return send


@contextmanager
def receiver(respond: Callable[[BaseHTTPRequestHandler, int], None] | None = None) -> Iterator[Receiver]:
    """Serve; `respond` answers each request, whose number from 0 it gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            served.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            (respond or answer(204))(self, len(served.requests) - 1)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        served = Receiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
