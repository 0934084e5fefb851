"""A bad line before an S3 endpoint: answers of 503, silence, broken connections, for as long as a fault lasts.

A TCP proxy on loopback, in a thread of its own. It needs an endpoint that speaks plain HTTP, as a server in one's own
network often does; requests are signed for the name that the client uses, which S3 servers accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from types import TracebackType
from urllib.parse import urlsplit

_METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_CHUNK_BYTES = 65536


def endpoint_of_environment() -> str | None:
    """Where S3 is, if that speaks plain HTTP."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return endpoint if endpoint is not None and urlsplit(endpoint).scheme == "http" else None


class BadLine:
    """A context; `endpoint` is where the clients go."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "localhost", parts.port or 80
        self._loop = asyncio.new_event_loop()
        self._how, self._until, self.num_spoiled = "", 0.0, 0

    def __enter__(self) -> BadLine:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="bad-line", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def spoil(self, how: str, seconds: float) -> None:
        """For so long: `busy` answers 503 to every request, `silent` forwards nothing, `broken` resets connections."""
        assert how in ("busy", "silent", "broken")
        self._how, self._until = how, time.monotonic() + seconds

    def _is(self, how: str) -> bool:
        return self._how == how and time.monotonic() < self._until

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            _reset(writer)
            return
        await asyncio.gather(
            self._forward(reader, upstream_writer, writer), self._forward(upstream_reader, writer, None)
        )
        for one in (writer, upstream_writer):
            one.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter | None
    ) -> None:
        """Bytes of one direction; `client` is who asks, where this is the requests' direction."""
        with contextlib.suppress(ConnectionError, OSError, RuntimeError):
            while data := await reader.read(_CHUNK_BYTES):
                if self._is("silent"):
                    self.num_spoiled += 1
                while self._is("silent"):
                    await asyncio.sleep(0.05)
                if self._is("broken"):
                    self.num_spoiled += 1
                    break
                if client is not None and self._is("busy") and data.startswith(_METHODS):
                    self.num_spoiled += 1
                    head = "HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
                    body = b"" if data.startswith(b"HEAD") else _SLOW_DOWN
                    client.write(f"{head}Content-Length: {len(_SLOW_DOWN)}\r\n\r\n".encode() + body)
                    await client.drain()
                    client.close()
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()
            else:
                writer.write_eof()
                return
        for one in (writer, client):
            if one is not None:
                _reset(one)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
