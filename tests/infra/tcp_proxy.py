"""A TCP proxy with faults: latency, a rate limit, resets, refusals, silence, and HTTP 503 answers.

It knows nothing of what it forwards, except that `http503` looks at the head of a request. Signatures stay valid:
not a byte is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 << 10
_METHODS = (b"GET", b"HEAD", b"PUT", b"POST", b"DELETE")
_BUSY = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"


@dataclass
class Faults:
    """What is wrong with the line.

    Attributes:
        latency_ms: how long each chunk waits, in both directions.
        rate_bps: bytes per second, for each direction of each connection.
        cut_after: a connection is reset once its client has sent more bytes than this.
        blackhole: connections stay open, but nothing moves.
        refuse: new connections are reset.
        http503: so many requests are answered with 503 SlowDown and never reach the server.
        match: only requests whose first 2,000 bytes contain this count for `http503`.
    """

    latency_ms: float = 0
    rate_bps: float = 0
    cut_after: int = 0
    blackhole: bool = False
    refuse: bool = False
    http503: int = 0
    match: str = ""


@dataclass
class Traffic:
    """What has passed so far.

    Attributes:
        connections: connections accepted, refused ones included.
        up: bytes from clients.
        down: bytes from the server.
        cut: connections reset by `cut_after`.
        busy: requests answered with 503.
    """

    connections: int = 0
    up: int = 0
    down: int = 0
    cut: int = 0
    busy: int = 0


@dataclass
class TcpProxy:
    """One listening port in front of one upstream port, both on loopback."""

    upstream: int
    port: int = 0
    faults: Faults = field(default_factory=Faults)
    traffic: Traffic = field(default_factory=Traffic)

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        """Forward connections until `stop` is set."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.traffic.connections += 1
        if self.faults.refuse:
            _reset(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            _reset(writer)
            return
        try:
            await asyncio.gather(
                self._forward_up(reader, server_writer, writer), self._forward_down(server_reader, writer)
            )
        finally:
            writer.close()
            server_writer.close()

    async def _forward_up(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        sent = 0
        with contextlib.suppress(OSError, RuntimeError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await self._impede(len(chunk))
                if self._is_refused(chunk):
                    await self._answer_busy(chunk, client)
                    break
                sent += len(chunk)
                self.traffic.up += len(chunk)
                if self.faults.cut_after and sent > self.faults.cut_after:
                    self.traffic.cut += 1
                    _reset(client)
                    _reset(server)
                    return
                server.write(chunk)
                await server.drain()
            else:
                server.write_eof()
                return
        client.close()
        server.close()

    async def _forward_down(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await self._impede(len(chunk))
                self.traffic.down += len(chunk)
                client.write(chunk)
                await client.drain()
            client.write_eof()
            return
        client.close()

    async def _impede(self, nbytes: int) -> None:
        while self.faults.blackhole:
            await asyncio.sleep(0.02)
        if self.faults.latency_ms:
            await asyncio.sleep(self.faults.latency_ms / 1e3)
        if self.faults.rate_bps:
            await asyncio.sleep(nbytes / self.faults.rate_bps)

    def _is_refused(self, chunk: bytes) -> bool:
        if self.faults.http503 <= 0 or chunk.partition(b" ")[0] not in _METHODS:
            return False
        return self.faults.match.encode() in chunk[:2000]

    async def _answer_busy(self, request: bytes, client: asyncio.StreamWriter) -> None:
        self.faults.http503 -= 1
        self.traffic.busy += 1
        head = (
            "HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(_BUSY)}\r\nConnection: close\r\n\r\n"
        )
        client.write(head.encode() + (b"" if request.startswith(b"HEAD") else _BUSY))
        await client.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that the other end sees a reset, not an end of file."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def tcp_proxy(upstream: int) -> Iterator[TcpProxy]:
    """A proxy in front of a port on loopback, in a thread with an event loop of its own."""
    proxy, ready = TcpProxy(upstream), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(proxy.serve(ready, stop))
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="tcp-proxy", daemon=True)
    thread.start()
    try:
        if not ready.wait(60):
            raise TimeoutError("the proxy does not listen after 60 s")
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
