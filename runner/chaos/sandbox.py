"""What a run under test has apart from the machine's: a wall clock that jumps, and memory that runs short."""

from __future__ import annotations

import contextlib
import mmap
import re
import shutil
import struct
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
# By how much a limit is raised that the kernel refuses.
_STEP_BYTES = 4 << 20
OFFSET_ENV = "CHAOS_CLOCK_OFFSET"
_CLOCK_SOURCE = Path(__file__).with_name("clock.c")


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

    @classmethod
    def build(cls, folder: Path) -> Clock | str:
        """Return a clock whose library is in `folder`, or why it cannot be built."""
        try:
            return cls(folder)
        except OSError as error:
            return str(error)

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
