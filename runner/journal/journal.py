"""The journal of a run: one JSON object per line, appended, never changed. Status and summary are folds over it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpointing.agent.events import Event, Log
from checkpointing.host.heartbeat import machine_clock
from checkpointing.host.own_files import open_own
from runner.journal.events import Entry, parse
from runner.system.text import all_visible

JOURNAL_NAME = "journal.jsonl"
_HEAD_BYTES = 256
_PIECE_BYTES = 4 * 1024 * 1024
# Reserved for the events with which a run ends.
_RESERVE_BYTES = 32 * 1024
_KEEP_SIZE = 1  # linux/falloc.h
_libc: Any = ctypes.CDLL(None, use_errno=True)


class SteadyClock:
    """Seconds since the epoch that neither jump nor run backwards, so that a run's seconds can be summed.

    The wall clock sets the start, `machine_clock` the progress: time that a laptop sleeps counts, a correction of the
    wall clock does not.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - machine_clock()

    def __call__(self) -> float:
        """Return the present time, in seconds since the epoch."""
        return self.at(machine_clock())

    def at(self, machine_time: float) -> float:
        """Convert a time of `machine_clock` on this machine to seconds since the epoch."""
        return machine_time + self._offset


class Journal:
    """Appends events to a journal; there is one writer.

    An event is one write(2), so a reader never sees half of a finished one. The journal reserves disk space for the
    next events where the file system supports it (fallocate(2)), so that a run's end is recorded on a disk that others
    have filled.

    Attributes:
        error: Why something could not be written when that was tried last; empty if it never failed.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Open the journal, creating it if it does not exist; OSError if the file cannot be written."""
        self._clock, self._path = clock, path
        self._fd = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._pending = b""
        self.error = ""
        self._reserved = 0
        self._reserve()
        # A last line that a power cut has torn must not swallow the next event.
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._pending += b"\n"

    def append(self, event: Event, attempt: int) -> Entry:
        """Append an event, and return its entry with the journal's time.

        A full disk must not end the run: what cannot be written is kept and written with the next event.
        """
        entry = Entry(round(self._clock(), 3), attempt, event)
        self._pending += (json.dumps(entry.to_dict()) + "\n").encode()
        try:
            self._write()
            if self._reserved < _RESERVE_BYTES // 2:
                self._reserve()
        except OSError as error:
            self.error = error.strerror or str(error)
            if error.errno == errno.ESTALE:
                self._open_again()
        return entry

    def _write(self) -> None:
        written = os.write(self._fd, self._pending)
        self._pending = self._pending[written:]
        self._reserved -= written

    def _open_again(self) -> None:
        """Replace a handle that a server has forgotten, and write what is pending, now or with the next event."""
        with contextlib.suppress(OSError):
            fd = open_own(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._fd, old = fd, self._fd
            self._reserved = 0
            os.close(old)
            self._write()
            self._reserve()

    @property
    def is_complete(self) -> bool:
        """Whether everything that was appended is in the file."""
        return not self._pending

    def close(self) -> None:
        """Write what is pending, release the reserved space and close the file."""
        try:
            if self._pending:
                self._write()
        except OSError as error:
            self.error = error.strerror or str(error)
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)
            os.fsync(self._fd)
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _reserve(self) -> None:
        size = os.fstat(self._fd).st_size
        if _libc.fallocate(self._fd, _KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(_RESERVE_BYTES)) == 0:
            self._reserved = _RESERVE_BYTES


def read_journal(path: Path) -> list[Entry]:
    """Return all whole events of a journal, oldest first; an empty list if there is none."""
    return JournalReader(path).entries()


class JournalReader:
    """Reads a journal that grows, each part of it once; see `EventStream` for `max_logs`."""

    def __init__(self, path: Path, max_logs: int | None = None) -> None:
        self._path, self._max_logs = path, max_logs
        self._stream = EventStream(max_logs)
        # The first event has a time and an id, which tell this journal from another one in its place.
        self._head = b""

    def entries(self) -> list[Entry]:
        """Return all whole events, oldest first; an empty list if there is no journal."""
        try:
            with self._path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                if not head.startswith(self._head) or os.fstat(file.fileno()).st_size < self._stream.nbytes:
                    self._stream = EventStream(self._max_logs)
                self._head = head
                file.seek(self._stream.nbytes)
                entries = self._stream.take(file.read(_PIECE_BYTES))
                while piece := file.read(_PIECE_BYTES):
                    entries = self._stream.take(piece)
                return entries
        except FileNotFoundError:
            self._stream = EventStream(self._max_logs)
            return []


class EventStream:
    """Parses a journal whose bytes arrive in pieces; `nbytes` have arrived.

    Args:
        max_logs: Log entries that are kept, for a reader that runs as long as the run; None for all. Of more than these
            it keeps every k-th one, and the last one of each attempt.
    """

    def __init__(self, max_logs: int | None = None) -> None:
        self.nbytes, self._entries, self._line = 0, list[Entry](), b""
        self._max_logs, self._num_logs, self._stride = max_logs, 0, 1
        # With their numbers.
        self._logs: list[tuple[int, Entry]] = []

    def take(self, piece: bytes) -> list[Entry]:
        """Parse the bytes after those before; return all whole events so far, oldest first."""
        self.nbytes += len(piece)
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            entry = parse(_decoded(line), self._last) if line.strip() else None
            if entry is not None:
                self._append(entry)
        last = _decoded(self._line)
        unfinished = parse(last, self._last) if last is not None else None
        return [*self._entries, *([unfinished] if unfinished is not None else [])]

    def _append(self, entry: Entry) -> None:
        if self._max_logs is not None and isinstance(entry.event, Log):
            self._num_logs += 1
            if self._logs and self._is_passed_over(*self._logs[-1], entry):
                before = self._logs.pop()[1]
                # One of the last few.
                index = next(i for i in reversed(range(len(self._entries))) if self._entries[i] is before)
                del self._entries[index]
            self._logs.append((self._num_logs, entry))
            if len(self._logs) > self._max_logs:
                self._stride *= 2
                dropped = {
                    id(log)
                    for (number, log), (_, after) in pairwise(self._logs)
                    if self._is_passed_over(number, log, after)
                }
                self._logs = [(number, log) for number, log in self._logs if id(log) not in dropped]
                self._entries = [one for one in self._entries if id(one) not in dropped]
                # Were there more attempts than this, each line would have all of them looked through.
                self._max_logs *= 2 if 4 * len(self._logs) > 3 * self._max_logs else 1
        self._entries.append(entry)

    def _is_passed_over(self, number: int, log: Entry, after: Entry) -> bool:
        """Return whether a log entry is neither a k-th one nor the last of its attempt, as the one after it shows."""
        return number % self._stride != 0 and log.attempt == after.attempt

    @property
    def _last(self) -> Entry | None:
        return self._entries[-1] if self._entries else None


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        values = all_visible(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
