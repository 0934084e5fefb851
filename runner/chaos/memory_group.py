"""A memory cgroup of a training's own, whose limit can be lowered under it (cgroups(7), version 1 and 2)."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
# Smallest distance to what is used that is tried.
_STEP_BYTES = 4 << 20


class MemoryGroup:
    """Exists until `close`; processes that are started by one that has entered it are in it, too."""

    def __init__(self) -> None:
        """Make one.

        Raises:
            OSError: that is not allowed here; the text says what is missing.
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
            raise OSError(f"no memory cgroup can be made here ({error.strerror}: {self._folder})") from None
        if not (self._folder / self._limit).exists():
            self._folder.rmdir()
            raise OSError(f"the memory controller is not on in {self._folder.parent}")

    def enter(self, pid: int) -> None:
        """Put a process in it."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def num_kills(self) -> int:
        """Processes that the kernel has ended in it for want of memory."""
        match = re.search(r"^oom_kill (\d+)$", (self._folder / self._events).read_text(), re.MULTILINE)
        return int(match.group(1)) if match else 0

    @contextlib.contextmanager
    def limited(self, spare_bytes: int) -> Iterator[None]:
        """No more memory than what is in use and cannot be given back, and so much besides, within the context."""
        stat = dict(line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))
        used = int((self._folder / self._usage).read_text())
        limit = max(used - cache, 0) + spare_bytes
        try:
            while True:
                try:
                    (self._folder / self._limit).write_text(str(limit))
                    break
                except OSError:  # version 1: the kernel could not take so much back
                    limit += _STEP_BYTES
            yield
        finally:
            (self._folder / self._limit).write_text(self._none)

    def close(self) -> None:
        """Its processes have ended, or go up again."""
        with contextlib.suppress(OSError):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._folder.parent / "cgroup.procs").write_text(pid)
            self._folder.rmdir()
