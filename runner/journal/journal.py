"""The run's only record: one JSON object per line, appended, never changed. Status and summary are folds over it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpointing.clock import machine_clock

Event = dict[str, Any]
JOURNAL_NAME = "journal.jsonl"
_HEAD_BYTES = 256
# For the events with which a run ends.
_ROOM_BYTES = 32 * 1024
_KEEP_SIZE = 1  # linux/falloc.h
_libc: Any = ctypes.CDLL(None, use_errno=True)


class SteadyClock:
    """Seconds since the epoch that neither jump nor go back, so that a run's seconds can be summed by them.

    The wall clock says where it begins, `machine_clock` how it goes on: a laptop's sleep counts, a corrected clock
    does not.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - machine_clock()

    def __call__(self) -> float:
        return self.at(machine_clock())

    def at(self, machine_time: float) -> float:
        """A time of `machine_clock` on this one."""
        return machine_time + self._offset


class Journal:
    """Appends events; each one carries `time` (seconds since the epoch), `event`, `attempt`, often `step`.

    One writer. An event is one write(2), so a reader never sees half of one that was finished. Room for the next ones
    is held, where the file system can (fallocate(2)): a disk that others have filled does not swallow how a run ended.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._pending = b""
        self._room = 0
        self._hold_room()
        # A torn last line (power cut in mid-write) must not swallow the next event.
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._pending += b"\n"

    def append(self, event: str, attempt: int, **details: Any) -> Event:
        entry: Event = {"time": round(self._clock(), 3), "event": event, "attempt": attempt, **details}
        self._pending += (json.dumps(entry) + "\n").encode()
        # A full disk must not end the run: what could not be written goes out with the next event.
        with contextlib.suppress(OSError):
            written = os.write(self._fd, self._pending)
            self._pending = self._pending[written:]
            self._room -= written
        if self._room < _ROOM_BYTES // 2:
            self._hold_room()
        return entry

    @property
    def is_complete(self) -> bool:
        """All that was appended is in the file."""
        return not self._pending

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Gives back the room that is held.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)
            os.fsync(self._fd)
        os.close(self._fd)

    def _hold_room(self) -> None:
        size = os.fstat(self._fd).st_size
        if _libc.fallocate(self._fd, _KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(_ROOM_BYTES)) == 0:
            self._room = _ROOM_BYTES


def read_journal(path: Path) -> list[Event]:
    """All whole events, in order; an empty list where there is no journal."""
    return JournalReader(path).events()


class JournalReader:
    """Reads a journal that grows: what it has been asked for before is not read again."""

    def __init__(self, path: Path) -> None:
        self._path, self._stream = path, EventStream()
        # Its first event, which holds a time and an id, tells it from another in its place.
        self._head = b""

    def events(self) -> list[Event]:
        """All whole events, in order; an empty list where there is no journal."""
        try:
            with self._path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                if not head.startswith(self._head) or os.fstat(file.fileno()).st_size < self._stream.nbytes:
                    self._stream = EventStream()
                self._head = head
                file.seek(self._stream.nbytes)
                return self._stream.take(file.read())
        except FileNotFoundError:
            self._stream = EventStream()
            return []


class EventStream:
    """Events of a journal whose bytes come piece by piece.

    Attributes:
        nbytes: how many have come.
    """

    def __init__(self) -> None:
        self.nbytes, self._events, self._line = 0, list[Event](), b""

    def take(self, piece: bytes) -> list[Event]:
        """All whole events so far, those of this piece of the journal among them."""
        self.nbytes += len(piece)
        lines, _, self._line = (self._line + piece).rpartition(b"\n")
        self._events += _events_in(lines)
        return [*self._events, *_events_in(self._line)]


def _events_in(data: bytes) -> Iterator[Event]:
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a power cut, or damaged since
        if isinstance(event, dict) and isinstance(event.get("event"), str) and _is_time(event.get("time")):
            yield event


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]
