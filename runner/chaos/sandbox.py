"""What a run under test has for itself, and faults disturb: its wall clock, its memory, the way to its S3 server."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

_MOUNT = Path("/sys/fs/cgroup")
# By how much a limit is raised that the kernel refuses.
_STEP_BYTES = 4 << 20
OFFSET_ENV = "CHAOS_CLOCK_OFFSET"
_CLOCK_SOURCE = Path(__file__).with_name("clock.c")
_METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_CHUNK_BYTES = 65536


def made_or_why_not(make: Callable[[], T]) -> T | str:
    """Return what `make` returns, or why this machine does not let it."""
    try:
        return make()
    except OSError as error:
        return str(error)


class Clock:
    """The wall clock of processes that are started with `environment`: a preloaded library adds an offset to libc's.

    libfaketime 0.9.10 cannot do this. With DONT_FAKE_MONOTONIC, which imitates a wrong time server, it refuses every
    sleep until a time of the monotonic clock (EINVAL), which is how Python sleeps.
    """

    def __init__(self, folder: Path) -> None:
        """Build the library in `folder`.

        Raises:
            OSError: There is no C compiler, or it fails; the text says which.
        """
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise OSError("cannot build the clock library: no C compiler; install cc or gcc")
        folder.mkdir(parents=True, exist_ok=True)
        library, offset = folder / "clock.so", folder / "offset"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_CLOCK_SOURCE), "-ldl", "-lpthread"]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode != 0:
            raise OSError(f"cannot build the clock library: {compiler}: {built.stderr.strip()[-300:]}")
        offset.write_bytes(struct.pack("q", 0))
        with offset.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), OFFSET_ENV: str(offset)}

    def set(self, seconds: int) -> None:
        """Set the offset from the machine's clock in seconds."""
        self._page[:] = struct.pack("q", seconds)


class MemoryGroup:
    """A memory cgroup whose limit can be lowered while a run is in it (cgroups(7), version 1 and 2).

    It exists until `close`. Children of a process in it belong to it, too.
    """

    def __init__(self) -> None:
        """Create the cgroup.

        Raises:
            OSError: It cannot be created here; the text says what is missing.
        """
        name = f"chaos-{uuid.uuid4().hex[:12]}"
        first = (_MOUNT / "memory").is_dir()
        self._folder = _MOUNT / "memory" / name if first else _MOUNT / name
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "-1")
        self._limit, self._usage, self._events, self._none = (
            names if first else ("memory.max", "memory.current", "memory.events", "max")
        )
        try:
            self._folder.mkdir()
        except OSError as error:
            raise OSError(f"cannot create a memory cgroup: {self._folder}: {error.strerror}") from None
        if not (self._folder / self._limit).exists():
            self._folder.rmdir()
            raise OSError(f"cannot limit memory: the memory controller is not enabled in {self._folder.parent}")

    def enter(self, pid: int) -> None:
        """Move a process into it."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def num_kills(self) -> int:
        """Number of processes in it that the kernel killed because memory ran out."""
        match = re.search(r"^oom_kill (\d+)$", (self._folder / self._events).read_text(), re.MULTILINE)
        return int(match.group(1)) if match else 0

    @contextlib.contextmanager
    def limited(self, spare_bytes: int) -> Iterator[None]:
        """Within the context, limit memory to what is in use without the page cache, plus `spare_bytes`."""
        stat = dict(line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))
        used = int((self._folder / self._usage).read_text())
        limit = max(used - cache, 0) + spare_bytes
        try:
            while True:
                try:
                    (self._folder / self._limit).write_text(str(limit))
                    break
                except OSError:  # Version 1 refuses a limit that it cannot reach by reclaiming.
                    limit += _STEP_BYTES
            yield
        finally:
            (self._folder / self._limit).write_text(self._none)

    def close(self) -> None:
        """Remove the cgroup; processes still in it move to its parent."""
        with contextlib.suppress(OSError):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._folder.parent / "cgroup.procs").write_text(pid)
            self._folder.rmdir()


def endpoint_of_environment() -> str | None:
    """Return the S3 endpoint of the environment if it speaks plain HTTP."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return endpoint if endpoint is not None and urlsplit(endpoint).scheme == "http" else None


class FaultyProxy:
    """A proxy in front of an S3 endpoint that answers 503, stays silent or resets connections while a fault lasts.

    It is a context manager, listens on loopback, and runs in its own thread. It needs an endpoint that speaks plain
    HTTP, as a server in a private network often does. Requests are signed for the name that the client uses, which S3
    servers accept.

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

        `busy` answers 503 to every request, `silent` forwards nothing, `broken` resets connections.
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
