"""`runner report --serve`: the report of a run as it is now, on the loopback device, for those who know its address."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from checkpointing.errors import CheckpointError
from runner.errors import RunnerError, UsageError
from runner.ui.web_server import web_server

# Seconds for which a page is served again: this multiple of the processor time that it took, within these bounds. The
# machine is the run's, and a journal of weeks takes long to read.
_FRESH_S, _LONGEST_FRESH_S = 2.0, 60.0
_FRESH_SHARE = 20
ADDRESS = "127.0.0.1"
# Names under which a browser reaches the loopback device, also through a tunnel. The name of another host that
# resolves to this address is a page of that host's (DNS rebinding).
_HOSTS = ("127.0.0.1", "localhost", "::1")
_HEADERS = [
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    # The address is the key.
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]


class LivePage:
    """A WSGI application with one page, at a path that nobody can guess; the page is made when it is asked for.

    Args:
        render: Returns the page; takes the seconds after which it asks again.
        monotonic: Seconds; likewise `processor`, of this thread.

    Attributes:
        path: The path of the page.
    """

    def __init__(
        self,
        render: Callable[[float], str],
        monotonic: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self.path = f"/{secrets.token_urlsafe(32)}/"
        self._render, self._monotonic, self._processor = render, monotonic, processor
        # One thread reads the journal; the others wait for its page.
        self._lock = threading.Lock()
        self._page, self._fresh_s, self._fresh_until = b"", _FRESH_S, 0.0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        status, body = self._answer(environ)
        length = ("Content-Length", str(len(body)))
        start_response(f"{status.value} {status.phrase}", [*_HEADERS, length])
        return [body if environ["REQUEST_METHOD"] != "HEAD" else b""]

    def _answer(self, environ: dict[str, Any]) -> tuple[HTTPStatus, bytes]:
        path = environ.get("PATH_INFO", "").encode("latin-1", "replace")
        if not _is_loopback(environ.get("HTTP_HOST", "")) or not hmac.compare_digest(path, self.path.encode()):
            return HTTPStatus.FORBIDDEN, b"forbidden: use the address that runner report --serve has printed\n"
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, b""
        try:
            return HTTPStatus.OK, self._fresh_page()
        except (RunnerError, CheckpointError, OSError):
            return HTTPStatus.SERVICE_UNAVAILABLE, b"the journal of the run cannot be read\n"

    def _fresh_page(self) -> bytes:
        with self._lock:
            if self._monotonic() >= self._fresh_until:
                began = self._processor()
                self._page = self._render(self._fresh_s).encode()
                took_s = self._processor() - began
                self._fresh_s = min(max(_FRESH_S, round(_FRESH_SHARE * took_s, 1)), _LONGEST_FRESH_S)
                self._fresh_until = self._monotonic() + self._fresh_s
            return self._page


def _is_loopback(host: str) -> bool:
    """Return whether a request's `Host` is a name of the loopback device, with any port."""
    try:
        return urlsplit(f"//{host}").hostname in _HOSTS
    except ValueError:
        return False


def serve(port: int, render: Callable[[float], str], notify: Callable[[str], None]) -> None:
    """Serve a page until the process is interrupted.

    Args:
        port: Port on the loopback device; 0 for one that is free.
        render: See `LivePage`.
        notify: Called with the address of the page.

    Raises:
        UsageError: The port cannot be used.
    """
    page = LivePage(render)
    try:
        server = web_server(ADDRESS, port, page)
    except OSError as error:
        raise UsageError(
            f"--port {port} cannot be used: {error.strerror}; choose another port, or omit the option"
        ) from None
    with server:
        notify(f"http://{ADDRESS}:{server.server_port}{page.path}")
        server.serve_forever()
