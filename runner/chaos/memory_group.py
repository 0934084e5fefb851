"""A memory cgroup for one run, whose limit can be lowered while it runs (cgroups(7), version 1 and 2)."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
# By how much a limit is raised that the kernel refuses.
_STEP_BYTES = 4 << 20


class MemoryGroup:
    """A cgroup that exists until `close`. Children of a process in it belong to it, too."""

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
