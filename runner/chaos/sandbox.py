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

# Deadlines of semaphores and conditions are wall-clock times, except those of the monotonic clock, which are small
# numbers. The kernel's clock has not jumped, so it gets the deadline without the offset.
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none = 0, *offset = &none;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("OFFSET_ENV");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) offset = page;
    close(fd);
}

static void *libc(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");  /* x86-64 has an older version of some symbols */
    return found ? found : dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = libc("clock_gettime");
    int result = real(id, t);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

static struct timespec of_the_kernel(const struct timespec *deadline) {
    struct timespec t = *deadline;
    if (t.tv_sec > 1000000000) t.tv_sec -= *offset;
    return t;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = libc("sem_timedwait");
    struct timespec t = of_the_kernel(deadline);
    return real(semaphore, &t);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = libc("pthread_cond_timedwait");
    struct timespec t = of_the_kernel(deadline);
    return real(condition, mutex, &t);
}
""".replace("OFFSET_ENV", OFFSET_ENV)


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
        source, library, offset = folder / "clock.c", folder / "clock.so", folder / "offset"
        source.write_text(_SOURCE)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
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
