"""A slow link: forwards TCP with a round-trip time, and with a rate that all connections share in each direction.

    python link.py UPSTREAM_PORT ROUND_TRIP_MS MBIT_PER_S        prints the port that it listens on

It runs in user space, because not every kernel has `tc netem`. Data in flight is kept in this process and not in the
sockets' buffers, so that a sender is slowed down as on a real link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

_CHUNK_BYTES = 64 * 1024
# By default the kernel accepts 6 MB per connection before any of it is forwarded.
_BUFFER_BYTES = 256 * 1024
# Timers are late by up to this much; a burst makes up for it.
_BURST_S = 0.01


class Lane:
    """One direction of the link: a chunk leaves when those before it have left, and arrives `delay_s` later."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_at = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward until the sender is done."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while (item := await under_way.get())[1]:
                await asyncio.sleep(item[0] - loop.time())
                writer.write(item[1])
                await writer.drain()
            writer.close()

        delivery = asyncio.create_task(deliver())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                self._free_at = max(self._free_at, loop.time() - _BURST_S) + len(data) / self._bytes_per_s
                under_way.put_nowait((self._free_at + self._delay_s, data))
                await asyncio.sleep(self._free_at - loop.time())
        under_way.put_nowait((0.0, b""))
        with contextlib.suppress(ConnectionError):
            await delivery


async def serve(upstream_port: int, round_trip_s: float, bytes_per_s: float) -> None:
    up, down = (Lane(bytes_per_s, round_trip_s / 2) for _ in range(2))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The TCP handshake.
        await asyncio.sleep(round_trip_s)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        await asyncio.gather(up.carry(reader, upstream_writer), down.carry(upstream_reader, writer))

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(connect, sock=listener, limit=_BUFFER_BYTES)
    print(listener.getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3, float(sys.argv[3]) * 1e6 / 8))
