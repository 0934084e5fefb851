"""HTTP requests to the metadata service of a cloud."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

# The service is one hop away, so an answer takes milliseconds or does not come. Connecting cannot be interrupted and
# must end within the second that `close` may take.
CONNECT_TIMEOUT_S = 0.8
REQUEST_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
# Transient statuses of the services of GCP and Azure; AWS sends them to clients that ask too often.
_TRANSIENT = frozenset({410, 429, 500, 502, 503, 504})


class Unavailable(Exception):
    """The service cannot be reached, or answers with a transient status."""


class Unexpected(Exception):
    """The answer is not that of this cloud's metadata service."""


@dataclass(frozen=True)
class Answer:
    """An answer of the service to a request (method and path): headers by lower-case name, and the stripped body."""

    request: str
    status: int
    headers: Mapping[str, str]
    text: str

    def require_ok(self) -> Answer:
        """Return the answer; raise Unexpected if its status is not 200."""
        if self.status != 200:
            raise Unexpected(f"{self.status} for {self.request}")
        return self

    def malformed(self) -> Unexpected:
        """Return the error for a body that cannot be parsed."""
        return Unexpected(f"{self.text[:80]!r} for {self.request}")


class MetadataClient:
    """HTTP client of one metadata service.

    It never uses a proxy: the answer would be about the proxy's instance, and the services refuse such requests.
    """

    def __init__(self, endpoint: str) -> None:
        """Prepare requests to the URL `endpoint`."""
        parts = urlsplit(endpoint)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def ask(self, method: str, path: str, headers: Mapping[str, str], timeout_s: float | None = None) -> Answer:
        """Send a request.

        Raises:
            Unavailable: There is no answer, or only a transient one.
            Unexpected: The answer is not HTTP.
        """
        # Imported late, because it takes 20 ms that `runner --help` does not need.
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
        if response.status in _TRANSIENT:
            raise Unavailable(f"{response.status} for {request}")
        return Answer(request, response.status, {k.lower(): v for k, v in response.getheaders()}, text)

    def get(self, path: str, headers: Mapping[str, str], timeout_s: float | None = None) -> Answer:
        """Send a GET request; see `ask`."""
        return self.ask("GET", path, headers, timeout_s)

    def close(self) -> None:
        """End a request of another thread at once, and refuse further ones."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[socket.socket]:
        # Connecting cannot be interrupted, so it must not begin after `close`.
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
                # Before the descriptor is closed, as its number may be reused for another file.
                with self._lock:
                    self._socket = None
