"""Locks that a killed build of a torch extension leaves behind.

`torch.utils.cpp_extension`, with which DeepSpeed compiles its kernels at the first start, creates a file named `lock`
while it builds, and waits without limit for that of another process. If the builder is killed, the file stays, and
every later start would wait until it is ended as a hang.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

import psutil

# The builder may be on another machine that shares the folder, or in another container: not seen from here. Builds of
# DeepSpeed's kernels take one to three minutes.
_LONGEST_BUILD_S = 600.0
# File systems that several machines mount.
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "gluster", "cifs", "smb", "9p", "virtiofs", "fuse")
# Some file systems round times down to a second.
_TIME_STEP_S = 1.0


class BuildLocks:
    """Removes abandoned locks at the beginning of every attempt of this node."""

    def __init__(self, environment: Mapping[str, str], report: Callable[[str], None]) -> None:
        self._folder, self._report = extension_folder(environment), report
        self._last_began = inf

    def begin_attempt(self, now: float) -> None:
        """Remove what ranks of this attempt would wait for without end; `now` is in seconds since the epoch."""
        for path in remove_abandoned(self._folder, since=self._last_began, now=now):
            self._report(f"removed {path}: the build of a torch extension that held it was killed")
        self._last_began = now


def extension_folder(environment: Mapping[str, str]) -> Path:
    """Return where torch builds extensions, as `torch.utils.cpp_extension` chooses it."""
    if chosen := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    if chosen := environment.get("XDG_CACHE_HOME"):
        return Path(chosen) / "torch_extensions"
    home = Path(environment.get("HOME", "/"))
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "torch_extensions"


def remove_abandoned(folder: Path, *, since: float, now: float) -> list[Path]:
    """Remove the locks of builds that nobody is working on; returns them.

    A lock is abandoned if no process of this machine has it open and it is either as new as this node's last attempt,
    whose processes are gone, or too old for a build that cannot be seen from here. In a folder that machines share,
    only the age counts. The last attempt on this node began at `since`, in seconds since the epoch; infinity if there
    was none.
    """
    try:
        # One folder per extension; by default, in one per version of Python and CUDA.
        found = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
        if found and _is_shared(folder):
            since = inf
        candidates = [path for path in found if _is_candidate(path, since, now - _LONGEST_BUILD_S)]
    except OSError:
        # This user cannot read the folder, and so builds nothing there.
        return []
    if not candidates:
        return []
    removed, held = [], _open_files()
    for path in candidates:
        if os.path.realpath(path) not in held:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _is_candidate(path: Path, since: float, too_old: float) -> bool:
    try:
        created = path.stat().st_mtime
    except OSError:
        return False
    return created >= since - _TIME_STEP_S or created <= too_old


def _is_shared(folder: Path) -> bool:
    """Return whether other machines may have the folder, too."""
    real = folder.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if real.is_relative_to(one.mountpoint)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else ""
    return kind.startswith(_SHARED)


def _open_files() -> set[str]:
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(file.path for file in process.open_files())
    return found
