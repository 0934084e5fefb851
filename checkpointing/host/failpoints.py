"""Named places in the code where a test, or `runner chaos`, injects a fault. Without the variables they do nothing.

    CHECKPOINT_FAILPOINTS="local.renamed=kill; remote.part=error@3" CHECKPOINT_FAILPOINTS_ONCE=/tmp/fired

`kill` ends the process by SIGKILL, `error` raises EIO, `full` raises ENOSPC, `oom` raises MemoryError, `pause` sleeps
for three seconds and `hang` for an hour, `nan` spoils what is computed there (only at `training.loss`); `@N` means the
N-th time that this process reaches the place (1 by default); of several (`@4,2`) each fires. With the second variable,
a folder, each fires once for all processes that share it, so that a restarted process passes.

    CHECKPOINT_FAILPOINTS_FILE=/tmp/failpoints

The same for running processes: a file that is read again whenever it was replaced (write another one, and rename it).
A failpoint that has fired is then named NAME.I.M in that folder, after the file's inode and its time of change in
nanoseconds, because two files written within one tick of the clock have the same time.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

FAILPOINTS_ENV = "CHECKPOINT_FAILPOINTS"
# Name of a thread that is paused.
HELD = "held"
ONCE_ENV = "CHECKPOINT_FAILPOINTS_ONCE"
FILE_ENV = "CHECKPOINT_FAILPOINTS_FILE"
_ACTIONS = ("kill", "error", "full", "oom", "pause", "hang", "nan")
_SLEEP_S = {"pause": 3.0, "hang": 3600.0}

# Everything that can be armed, in the order in which one save, one removal and one restore reach it.
NAMES = (
    "fence.written",  # local: the new fence exists under its temporary name
    "fence.opened",  # older attempts are shut out, what they have published is not listed yet
    "fence.published",  # it is listed, and counts
    "local.begun",  # the temporary directory exists
    "local.write",  # a piece of a file is written
    "local.written",  # a file is written and durable
    "local.manifest",  # so is the manifest
    "local.synced",  # the temporary directory is durable
    "local.renamed",  # it has its name, which a power cut may still undo
    "local.committed",
    "remote.part",  # a part of a file is uploaded
    "remote.uploaded",  # a file is
    "remote.publishing",  # the manifest is about to be put
    "remote.published",  # it is put
    "remote.committed",  # and the fence was checked again
    "dcp.written",  # a file of torch.distributed.checkpoint is written, not durable yet
    "dcp.publishing",  # all of them are in their place, the index is about to be
    "dcp.published",  # it is
    "shard.written",  # a node that does not commit has written a shard
    "shard.reported",  # and its digests
    "split.written",  # the node that commits has written its parts of a file that several nodes write
    "split.closed",  # all have, and the file is complete
    "portion.written",  # a node that does not commit has written its parts of a file
    "portion.reported",  # and has said so
    "local.removing",  # prune: the checkpoint has lost its name
    "local.unlisted",  # prune: its manifest is gone
    "remote.unlisted",
    "aside.copied",  # quarantine in object storage: the manifest exists under both names
    "snapshot.copying",  # a rank is about to copy into the arena
    "snapshot.copied",  # it has copied, and has not told the agent yet
    "training.loss",  # a rank has computed the loss of a micro-batch
    "training.step",  # a rank has finished a step
    "training.evaluation",  # a Trainer has evaluated a batch
    "training.epoch",  # an epoch has ended
    "restore.read",  # a rank has read and verified what it resumes from
)


@dataclass
class _Armed:
    action: str
    numbers: tuple[int, ...]
    count: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


def _parse(text: str) -> dict[str, _Armed]:
    armed = {}
    for item in filter(None, (item.strip() for item in text.split(";"))):
        name, _, what = item.partition("=")
        action, _, listed = what.partition("@")
        numbers = (listed or "1").split(",")
        if name not in NAMES or action not in _ACTIONS or not all(number.isdigit() for number in numbers):
            raise ValueError(
                f"{FAILPOINTS_ENV}: {item!r} is not allowed; write NAME={'|'.join(_ACTIONS)}[@N[,N...]] with one of "
                f"the names {', '.join(NAMES)}"
            )
        armed[name] = _Armed(action, tuple(map(int, numbers)))
    return armed


try:
    _armed = _parse(os.environ.get(FAILPOINTS_ENV, ""))
except ValueError as _error:
    raise SystemExit(f"error: {_error}") from None
_file = os.environ.get(FILE_ENV)
# Which file was read the last time: inode and time of change.
_version: tuple[int, int] | None = None
_lock = threading.Lock()


def failpoint(name: str) -> bool:
    """Inject the fault that is armed at a place, if any.

    Args:
        name: Name of the place.

    Returns:
        Whether what is computed there is to be spoiled.

    Raises:
        OSError: A failing or full disk is armed there.
        MemoryError: A lack of memory is armed there.
    """
    if not _armed and _file is None:
        return False
    with _lock:
        if _file is not None:
            _read_again(Path(_file))
        point = _armed.get(name)
        if point is None or not _fires(name, next(point.count), point.numbers):
            return False
    match point.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause" | "hang":
            # For tests that wait for it: proc(5) shows the name of each thread.
            Path("/proc/thread-self/comm").write_text(HELD)
            time.sleep(_SLEEP_S[point.action])
        case "nan":
            return True
        case "oom":
            raise MemoryError(f"out of memory (failpoint {name})")
        case action:
            code = errno.EIO if action == "error" else errno.ENOSPC
            raise OSError(code, f"{os.strerror(code)} (failpoint {name})")
    return False


def _read_again(file: Path) -> None:
    global _armed, _version
    with contextlib.suppress(OSError):
        status = file.stat()
        if (status.st_ino, status.st_mtime_ns) != _version:
            _version = (status.st_ino, status.st_mtime_ns)
            _armed = _parse(file.read_text())


def _fires(name: str, count: int, numbers: tuple[int, ...]) -> bool:
    marks = [name if place == 0 else f"{name}.{place}" for place in range(len(numbers))]
    return any(count == number and _first(mark) for mark, number in zip(marks, numbers, strict=True))


def _first(name: str) -> bool:
    folder = os.environ.get(ONCE_ENV)
    if folder is None:
        return True
    # Each version of a file has its own marks, so that a process that has read an old one does not use up a new one's.
    mark = name if _version is None else f"{name}.{_version[0]}.{_version[1]}"
    try:
        (Path(folder) / mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
