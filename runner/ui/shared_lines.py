"""A terminal, or a file, to which the runner and its ranks write: lines stay whole, and so does a progress bar."""

from __future__ import annotations

from collections.abc import Callable

# To the begin of the line, and erase to its end (ECMA-48, EL).
_ERASE_LINE = b"\r\x1b[K"
_LONGEST_BAR_BYTES = 4096


class SharedLines:
    """Writes for several sources.

    What a source has not finished, such as a bar that it draws again and again with a carriage return, is erased from a
    terminal for the line of another one, and drawn again below. In a file, the other one begins a line.

    Args:
        write: Writes bytes.
        is_terminal: Whether what is written can be erased.
    """

    def __init__(self, write: Callable[[bytes], None], *, is_terminal: bool) -> None:
        self._write, self._is_terminal = write, is_terminal
        self._source: object = None
        # What its last line looks like by now.
        self._unfinished = b""

    def put(self, source: object, data: bytes) -> None:
        """Write what a source says next."""
        if self._unfinished and source != self._source:
            can_return = self._is_terminal and data.endswith(b"\n") and len(self._unfinished) < _LONGEST_BAR_BYTES
            if can_return:
                self._write(_ERASE_LINE + data + self._unfinished)
                return
            self._write(b"\n")
            self._unfinished = b""
        self._write(data)
        self._source = source
        _, newline, tail = data.rpartition(b"\n")
        line = (b"" if newline else self._unfinished) + tail
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        # A carriage return at the end erases nothing yet, but what comes next does. More than can be drawn again is not
        # kept: output without line ends has any length.
        returns = b"\r" if shown and line.endswith(b"\r") else b""
        self._unfinished = shown[:_LONGEST_BAR_BYTES] + returns
