"""What reaches the user's terminal: streams that cannot end a run, and the ranks' output passed on as it is."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Where torchrun keeps a rank's standard output and error, beside its error file.
STDOUT_NAME, STDERR_NAME = "stdout.log", "stderr.log"
_INTERVAL_S = 0.2
_CHUNK_BYTES = 64 * 1024
# A terminal that was stopped (Ctrl-S), or a pipe that nobody reads, holds up no more than this at the end.
_PATIENCE_S = 5.0


class _Lossy(io.RawIOBase):
    """A file descriptor to write to, of which a failure is forgotten: a run must not end with its log's volume."""

    def __init__(self, fd: int) -> None:
        self._fd, self._told = fd, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        # The buffer on top of this one passes a memoryview.
        view = memoryview(data)  # type: ignore[arg-type]
        # ENOSPC, EPIPE, EIO, a full pipe that does not block: what is not taken now is lost; the rest may not be.
        try:
            left = view
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._tell(error)
        return len(view)

    def _tell(self, error: OSError) -> None:
        """Once, where the other stream is; a closed pipe (`| head`) is what its reader wants."""
        if self._fd != 1 or self._told or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return
        self._told = True
        with contextlib.suppress(OSError):
            os.write(2, f"runner: warning: standard output cannot be written: {error.strerror}\n".encode())


def make_streams_lossy() -> None:
    """Replace `sys.stdout` and `sys.stderr`: neither a full disk nor a closed pipe nor a character set raises there.

    Characters that the encoding lacks are written as `?`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            fd, encoding = stream.fileno(), stream.encoding
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # Closed, or a test's own.
            continue
        buffered = io.BufferedWriter(_Lossy(fd))
        setattr(sys, name, io.TextIOWrapper(buffered, encoding=encoding, errors="replace", line_buffering=True))


class OutputRelay:
    """Copies the ranks' log files to the terminal while they grow, byte for byte: progress bars stay what they are.

    A thread of its own: a terminal that takes nothing holds up nobody else.
    """

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        """
        Args:
            write: called with 1 (standard output) or 2 (standard error), and what a rank has written there.
        """
        self._write = write
        self._lock = threading.Lock()
        # File descriptors of the logs, and the stream that each goes to.
        self._logs: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def follow(self, folder: Path) -> None:
        """Begin with the logs of a rank."""
        for stream, name in ((1, STDOUT_NAME), (2, STDERR_NAME)):
            with contextlib.suppress(OSError), self._lock:
                self._logs.append((os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC), stream))

    def finish(self) -> None:
        """Pass on what is left, once the ranks are gone."""
        self._ended.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            # What was written before the end is read after it.
            ended = self._ended.wait(_INTERVAL_S)
            with self._lock:
                logs = list(self._logs)
            for fd, stream in logs:
                with contextlib.suppress(OSError):
                    while data := os.read(fd, _CHUNK_BYTES):
                        self._write(stream, data)
        for fd, _ in logs:
            os.close(fd)
