"""The user's terminal: standard streams whose errors cannot end a run, and the ranks' output, copied unchanged."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Names of the files in which torchrun keeps a rank's standard output and error, next to its error file.
STDOUT_NAME, STDERR_NAME = "stdout.log", "stderr.log"
_INTERVAL_S = 0.2
_CHUNK_BYTES = 64 * 1024
# Seconds that a stopped terminal (Ctrl-S), or a pipe without a reader, may delay the end.
_PATIENCE_S = 5.0


class _Lossy(io.RawIOBase):
    """A file descriptor whose write errors are ignored: a full log volume must not end a run."""

    def __init__(self, fd: int) -> None:
        self._fd, self._warned = fd, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        # The buffer on top of this one passes a memoryview.
        view = memoryview(data)  # type: ignore[arg-type]
        # After ENOSPC, EPIPE, EIO, or on a full non-blocking pipe, the rest of this data is lost; later writes may
        # succeed.
        try:
            left = view
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._warn(error)
        return len(view)

    def _warn(self, error: OSError) -> None:
        """Print a warning once, to standard error; a closed pipe (`| head`) is intended."""
        if self._fd != 1 or self._warned or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return
        self._warned = True
        with contextlib.suppress(OSError):
            os.write(2, f"runner: warning: cannot write standard output: {error.strerror}\n".encode())


def make_streams_lossy() -> None:
    """Replace `sys.stdout` and `sys.stderr` with streams that a full disk or a closed pipe does not make fail.

    Characters that the encoding lacks are written as `?`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            fd, encoding = stream.fileno(), stream.encoding
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # The stream is closed, or a test has replaced it.
            continue
        buffered = io.BufferedWriter(_Lossy(fd))
        setattr(sys, name, io.TextIOWrapper(buffered, encoding=encoding, errors="replace", line_buffering=True))


class OutputRelay:
    """Copies the ranks' log files to the terminal while they grow, byte for byte, so that progress bars work.

    It runs in a thread: a terminal that is stopped delays nothing else.
    """

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        """Start the thread.

        Args:
            write: Called with 1 (standard output) or 2 (standard error), and what a rank has written there.
        """
        self._write = write
        self._lock = threading.Lock()
        # File descriptors of the logs, and the stream that each goes to.
        self._logs: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def follow(self, folder: Path) -> None:
        """Begin to copy the logs of a rank.

        Args:
            folder: The rank's folder.
        """
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
                        self._write(stream, data)
        for fd, _ in logs:
            os.close(fd)
