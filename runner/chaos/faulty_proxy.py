"""A proxy in front of an S3 endpoint that answers 503, stays silent or resets connections while a fault lasts.

The TCP proxy listens on loopback, in its own thread. It needs an endpoint that speaks plain HTTP, as a server in a
private network often does. Requests are signed for the name that the client uses, which S3 servers accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

_METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_CHUNK_BYTES = 65536


def endpoint_of_environment() -> str | None:
    """Return the S3 endpoint of the environment if it speaks plain HTTP."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return endpoint if endpoint is not None and urlsplit(endpoint).scheme == "http" else None


class FaultyProxy:
    """A context manager that runs the proxy.

    Attributes:
        endpoint: URL for the clients.
        num_disturbed: Number of requests or pieces of data that a fault affected.
    """

    endpoint: str

    def __init__(self, upstream: str) -> None:
        """Prepare a proxy to the URL `upstream`."""
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "localhost", parts.port or 80
        self._loop = asyncio.new_event_loop()
        self._how, self._until, self.num_disturbed = "", 0.0, 0

    def __enter__(self) -> FaultyProxy:
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    def disturb(self, how: str, seconds: float) -> None:
        """Disturb the traffic for a time.

        Args:
            how: `busy` answers 503 to every request, `silent` forwards nothing, `broken` resets connections.
            seconds: Duration in seconds.
        """
        assert how in ("busy", "silent", "broken")
        self._how, self._until = how, time.monotonic() + seconds

    def _is(self, how: str) -> bool:
        return self._how == how and time.monotonic() < self._until

    async def _end(self) -> None:
        """End the connections that clients keep open: pending tasks would log an error when they are collected."""
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(upstream_writer)
            await asyncio.gather(
                self._forward(reader, upstream_writer, writer), self._forward(upstream_reader, writer, None)
            )
        except (OSError, asyncio.CancelledError):
            for one in writers:
                _reset(one)
            return
        for one in writers:
            one.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter | None
    ) -> None:
        """Forward one direction; `client` is the client's own stream where these are requests, to answer them."""
        with contextlib.suppress(ConnectionError, OSError, RuntimeError):
            while data := await reader.read(_CHUNK_BYTES):
                if self._is("silent"):
                    self.num_disturbed += 1
                while self._is("silent"):
                    await asyncio.sleep(0.05)
                if self._is("broken"):
                    self.num_disturbed += 1
                    break
                if client is not None and self._is("busy") and data.startswith(_METHODS):
                    self.num_disturbed += 1
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
