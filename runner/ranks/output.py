"""The user's terminal: standard streams whose errors cannot end a run, and the ranks' output, copied unchanged."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# Names of the files in which torchrun keeps a rank's standard output and error, and how it has failed.
STDOUT_NAME, STDERR_NAME, ERROR_NAME = "stdout.log", "stderr.log", "error.json"
_INTERVAL_S = 0.2
_CHUNK_BYTES = 64 * 1024
# Seconds that a stopped terminal (Ctrl-S), or a pipe without a reader, may delay the end.
_PATIENCE_S = 2.0
# What a pipe takes without waiting where poll(2) says that it takes something (pipe(7)).
_AT_ONCE_BYTES = 4096
_MOST_WAITING_BYTES = 1 << 20


class _Queue:
    """What waits for a terminal or a pipe, and the thread that writes it there; `changed` is held to look at it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0
        self._waiting: deque[tuple[Callable[[bytes], int], bytes]] = deque()
        self._thread: threading.Thread | None = None

    def put(self, write: Callable[[bytes], int], data: bytes) -> None:
        """Have data written by `write`, which returns how many bytes it took, unless too much waits.

        `changed` is held.
        """
        if self.nbytes + len(data) > _MOST_WAITING_BYTES:
            return
        self._waiting.append((write, data))
        self.nbytes += len(data)
        if self._thread is None:
            thread = threading.Thread(target=self._write, name="terminal", daemon=True)
            # Under a limit of threads, with a later line.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        self.changed.notify_all()

    def drain(self, patience_s: float) -> None:
        """Wait until everything is written, but no longer than `patience_s` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: not self.nbytes, patience_s)

    def _write(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._waiting)
                write, data = self._waiting.popleft()
            left = data
            while left:
                taken = write(left)
                left = left[taken:]
                if not taken:
                    time.sleep(_INTERVAL_S)
            with self.changed:
                self.nbytes -= len(data)
                self.changed.notify_all()


class _Lossy(io.RawIOBase):
    """A file descriptor that ends or delays nothing: errors are ignored, and a thread writes what has to wait.

    A terminal may be stopped (Ctrl-S, a session that hangs), a pipe may have no reader. Beyond a megabyte the rest of
    what such a one is given is lost. Descriptors of one terminal share its queue: lines then keep their order.
    """

    def __init__(self, fd: int, queue: _Queue) -> None:
        self._fd, self.queue, self._warned = fd, queue, False
        # poll(2) says of a terminal that it takes something as soon as it takes a byte.
        self._takes_parts = not os.isatty(fd)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        # The buffer on top of this one passes a memoryview, of memory that it uses again.
        left = given = bytes(data)  # type: ignore[call-overload]
        with self.queue.changed:
            while left and not self.queue.nbytes and self._takes_parts and self._poll.poll(0):
                taken = self._write(left[:_AT_ONCE_BYTES])
                left = left[taken:]
                if not taken:
                    break
            if left:
                self.queue.put(self._write, left)
        return len(given)

    def _write(self, data: bytes) -> int:
        """Write some bytes; return how many are done with. What is refused is lost; later writes may succeed."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            # Another process has made it non-blocking.
            return 0
        except OSError as error:
            self._warn(error)
            return len(data)

    def _warn(self, error: OSError) -> None:
        """Print a warning once, to standard error; a closed pipe (`| head`) is intended."""
        if self._fd != 1 or self._warned or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return
        self._warned = True
        with contextlib.suppress(OSError):
            os.write(2, f"runner: warning: cannot write standard output: {error.strerror}\n".encode())


# Of the streams that were replaced.
_queues: list[_Queue] = []


def make_streams_lossy() -> None:
    """Replace `sys.stdout` and `sys.stderr` with streams that neither fail nor block.

    Characters that the encoding lacks are written as `?`.
    """
    of_terminals: dict[int, _Queue] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            fd, encoding = stream.fileno(), stream.encoding
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # The stream is closed, or a test has replaced it.
            continue
        # One for each terminal.
        queue = of_terminals.setdefault(os.fstat(fd).st_rdev, _Queue()) if os.isatty(fd) else _Queue()
        if queue not in _queues:
            _queues.append(queue)
        buffered = io.BufferedWriter(_Lossy(fd, queue))
        setattr(sys, name, io.TextIOWrapper(buffered, encoding=encoding, errors="replace", line_buffering=True))
    atexit.register(drain_streams)


def drain_streams() -> None:
    """Wait for a terminal that is slow, before the process ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    deadline = time.monotonic() + _PATIENCE_S
    for queue in _queues:
        queue.drain(max(deadline - time.monotonic(), 0.0))


class OutputRelay:
    """Copies the ranks' log files to the terminal while they grow, byte for byte, so that progress bars work.

    It runs in a thread, and waits for a terminal that is stopped. What that has not taken soon after the ranks' end is
    in their logs only.
    """

    def __init__(self, write: Callable[[int, bytes, object], None]) -> None:
        """Start the thread.

        Args:
            write: Is called with 1 (standard output) or 2, what a rank has written there, and what tells this rank's
                stream from others.
        """
        self._write = write
        self._lock = threading.Lock()
        # File descriptors of the logs, and the stream that each goes to.
        self._logs: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def follow(self, folder: Path) -> None:
        """Begin to copy the logs of a rank, which are in its folder."""
        for stream, name in ((1, STDOUT_NAME), (2, STDERR_NAME)):
            with contextlib.suppress(OSError), self._lock:
                self._logs.append((os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC), stream))

    def finish(self) -> None:
        """Copy the rest, after the ranks have ended."""
        self._ended.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            # Read once more after the end: the ranks may have written since the last turn.
            ended = self._ended.wait(_INTERVAL_S)
            with self._lock:
                logs = list(self._logs)
            for fd, stream in logs:
                with contextlib.suppress(OSError):
                    while data := os.read(fd, _CHUNK_BYTES):
                        self._write(stream, data, fd)
                        while any(queue.nbytes for queue in _queues):
                            for queue in _queues:
                                queue.drain(_INTERVAL_S)
        for fd, _ in logs:
            # A file system that is gone says so at the end, too.
            with contextlib.suppress(OSError):
                os.close(fd)
