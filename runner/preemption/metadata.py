"""Asking the metadata service of the cloud that this machine is of."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

# The service is one hop away: what it does not answer in this time it will not answer. Connecting cannot be interrupted
# and must end within the second that closing may take.
CONNECT_TIMEOUT_S = 0.8
REQUEST_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
# GCP's and Azure's services may say these for a moment, AWS's when it is asked too often.
_COME_BACK_LATER = frozenset({410, 429, 500, 502, 503, 504})


class Unavailable(Exception):
    """The service cannot be reached, or says to come back later."""


class Unexpected(Exception):
    """Something answers, but not as this cloud does."""


@dataclass(frozen=True)
class Answer:
    """`headers` are by lower-case name."""

    request: str
    status: int
    headers: Mapping[str, str]
    text: str

    def require_ok(self) -> Answer:
        if self.status != 200:
            raise Unexpected(f"{self.status} for {self.request}")
        return self

    def malformed(self) -> Unexpected:
        return Unexpected(f"{self.text[:80]!r} for {self.request}")


class MetadataClient:
    """HTTP to one metadata service. Never through a proxy: the answer would be about the proxy's machine, and the
    services refuse it."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def ask(self, method: str, path: str, headers: Mapping[str, str], timeout_s: float | None = None) -> Answer:
        """One request, within REQUEST_TIMEOUT_S where nothing else is said.

        Raises:
            Unavailable: no answer, or not for now.
            Unexpected: the answer is not HTTP.
        """
        # Costs 20 ms, which `runner --help` need not pay.
        import http.client

        request = f"{method} {path.partition('?')[0]}"
        try:
            with self._connection(REQUEST_TIMEOUT_S if timeout_s is None else timeout_s) as sock:
                connection = http.client.HTTPConnection(self._host, self._port)
                connection.sock = sock
                connection.request(method, path, headers=dict(headers))
                with connection.getresponse() as response:
                    text = response.read(MAX_ANSWER_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise Unavailable(f"{error.strerror or error} for {request}") from None
        except http.client.HTTPException as error:
            raise Unexpected(f"{type(error).__name__} for {request}") from None
        if response.status in _COME_BACK_LATER:
            raise Unavailable(f"{response.status} for {request}")
        return Answer(request, response.status, {k.lower(): v for k, v in response.getheaders()}, text)

    def get(self, path: str, headers: Mapping[str, str], timeout_s: float | None = None) -> Answer:
        return self.ask("GET", path, headers, timeout_s)

    def close(self) -> None:
        """A request in another thread ends at once; none is begun any more."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[socket.socket]:
        # Connecting cannot be interrupted: where it is known by now, none is begun.
        if self._closed:
            raise ConnectionAbortedError("closed")
        with socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_S) as sock:
            sock.settimeout(timeout_s)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("closed")
                self._socket = sock
            try:
                yield sock
            finally:
                # Before the descriptor is closed: its number may soon be another file's.
                with self._lock:
                    self._socket = None
