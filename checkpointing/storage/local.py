"""Checkpoints on a local disk or a mounted volume (PVC, NFS); `local_transaction` writes them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from checkpointing.errors import AWAY_ERRNOS, ForeignCheckpoint, InvalidCheckpoint
from checkpointing.format.manifest import MANIFEST_NAME, Manifest
from checkpointing.host.failpoints import failpoint
from checkpointing.host.watched_directory import WatchedDirectory
from checkpointing.storage.base import CHECKPOINT_PREFIX, IRREGULAR, NUMBER, Storage
from checkpointing.storage.durable import fsync_directory, replace_file, write_file
from checkpointing.storage.fence import Fence
from checkpointing.storage.local_transaction import LocalTransaction
from checkpointing.storage.rates import Rates, dead_trials, measure_directory, trial_name
from checkpointing.storage.sidecars import LOCAL_RESTART_STATE, LocalSidecars

_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}({NUMBER})\Z")
_TEMPORARY = re.compile(rf"\.(?:{CHECKPOINT_PREFIX}{NUMBER}(?:\.[0-9a-f]+)?|fence\.json)\.({NUMBER})\.tmp\Z")
_TEMPORARY_STATE = re.compile(rf"\.runner\.json\.{NUMBER}\.tmp\Z")
_QUARANTINED = re.compile(rf"{CHECKPOINT_PREFIX}({NUMBER})\.(invalid|superseded)(-{NUMBER})?\Z")
# Of a stock Trainer and of this library.
TRAINER_STATE = "trainer_state.json"
_ONLY_OURS = re.compile(r"loop_state_\d+\.json\Z|data_state(_\d+)?\.pth\Z|rank_state_\d+(_[a-z_]+)?\.pt\Z")
_FENCE_NAME = ".fence.json"
_REMOVING = re.compile(rf"\.{CHECKPOINT_PREFIX}{NUMBER}\.removing\Z")


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """Go on without a file that is not there, or is damaged."""
    try:
        yield
    except OSError as error:
        if error.errno in AWAY_ERRNOS:
            raise


def _add_sizes(folder: Path, prefix: str, sizes: dict[str, int]) -> None:
    with _gone(), os.scandir(folder) as entries:
        for entry in entries:
            with _gone():
                if entry.is_dir(follow_symlinks=False):
                    _add_sizes(Path(entry.path), f"{prefix}{entry.name}/", sizes)
                status = entry.stat(follow_symlinks=False)
                sizes[f"{prefix}{entry.name}"] = status.st_size if stat.S_ISREG(status.st_mode) else IRREGULAR


class LocalStorage(Storage):
    """See `Storage`. `root` is created on the first write."""

    root: Path
    can_split = True  # nodes that write here share a file system

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        # Once an attempt has begun, a directory that is missing may be on a volume that was unmounted.
        self.sidecars = LocalSidecars(root, may_create=lambda: self._claim.attempt < 0 or self._was_made_again)
        self._was_made_again = False
        self._watched: WatchedDirectory | None = None

    def probe(self) -> None:
        """Do with a small file what a commit does: write, sync and rename it, list and read it, and remove it."""
        self.root.mkdir(parents=True, exist_ok=True)
        data, path = b"written by checkpointing to see what works here", self.root / trial_name(".probe.")
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            write_file(temporary, [memoryview(data)])
            temporary.rename(path)
            fsync_directory(self.root)
            names = self._names()
            if path.name not in names or path.read_bytes() != data:
                raise OSError(errno.EIO, "what was written there cannot be read back", str(self.root))
        finally:
            for written in (temporary, path):
                written.unlink(missing_ok=True)
        for name in dead_trials(names, time.time()):
            with contextlib.suppress(OSError):  # another user's
                (self.root / name).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return the free space of the file system."""
        return shutil.disk_usage(self.root).free

    def measure(self, checkpoint_bytes: int) -> Rates | None:
        """Measure by writing a file."""
        return measure_directory(self.root, checkpoint_bytes)

    def remove_all(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.root, ignore_errors=True)

    def fence(self) -> Fence:
        """Read the fence's file."""
        path = self.root / _FENCE_NAME
        try:
            return Fence.from_json(path.read_bytes())
        except FileNotFoundError:
            return Fence()
        except ValueError as error:
            raise OSError(f"{path}: {error}; remove it if no run writes here") from None

    def watch_location(self) -> None:
        """Hold the directory."""
        self._watched = WatchedDirectory(self.root)

    def begin(
        self, step: int, attempt: int, identity: str = "", *, joins: bool = False, continues: bool = False
    ) -> LocalTransaction:
        """Create the temporary directory."""
        if self.has_begun(attempt):
            self._make_again_if_removed(attempt)
        return LocalTransaction(self, self.root, step, attempt, identity, joins=joins, continues=continues)

    def has_step(self, step: int) -> bool:
        """Return whether there is a directory of that name; the others are not looked at."""
        return os.path.lexists(self.directory(step))

    def _make_again_if_removed(self, attempt: int) -> None:
        """Make a directory again that somebody has removed, with the attempt's fence: training still has its state.

        Raises:
            OSError: It was moved, or its volume is not there.
        """
        if self._watched is None or not self._watched.was_removed:
            if not self.root.is_dir():
                raise OSError(
                    errno.ENOENT, f"{self.root} existed when attempt {attempt} began and is gone; put it back"
                )
            return
        # Others may have made it already: who renews a lease, or takes a lock.
        self.root.mkdir(parents=True, exist_ok=True)
        if self.fence().attempt < attempt:
            self._put_fence(self._claim.completed(()))
        self._was_made_again, self._watched = True, WatchedDirectory(self.root)
        text = f"{self.root} was removed while attempt {attempt} ran; it is made again, and what it held is lost"
        print(f"checkpoint agent: {text}", file=sys.stderr, flush=True)

    def describe(self, step: int) -> str:
        """Return the checkpoint's path."""
        return str(self.directory(step))

    def directory(self, step: int) -> Path:
        """Return the checkpoint's directory, whether or not it exists."""
        return self.root / f"{CHECKPOINT_PREFIX}{step}"

    def file(self, manifest: Manifest, name: str) -> Path:
        """Return the path of a file."""
        return self.directory(manifest.step) / name

    def _are_foreign(self, names: Sequence[str]) -> bool:
        # One of this library may have lost its manifest.
        return TRAINER_STATE in names and MANIFEST_NAME not in names and not any(map(_ONLY_OURS.match, names))

    def keeps(self, manifest: Manifest) -> bool:
        """Return whether this very checkpoint is here, and make its name durable."""
        is_kept = super().keeps(manifest)
        if is_kept:
            # The earlier try may have failed at this.
            fsync_directory(self.root)
        return is_kept

    def refresh(self, step: int) -> None:
        """Drop the checkpoint's files from the page cache."""
        found = ((folder, name) for folder, _, names in os.walk(self.directory(step)) for name in names)
        for folder, name in found:
            with contextlib.suppress(OSError):
                descriptor = os.open(Path(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def remove(self, step: int) -> None:
        """Rename the directory, then delete it."""
        path = self.directory(step)
        # One atomic rename first: a crash during the deletion then leaves no directory with a checkpoint's name.
        doomed = self.root / f".{CHECKPOINT_PREFIX}{step}.removing"
        if doomed.exists():
            fsync_directory(self.root)
            shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        # A power cut must not restore its name without its files.
        fsync_directory(self.root)
        failpoint("local.removing")
        with contextlib.suppress(FileNotFoundError):
            (doomed / MANIFEST_NAME).unlink()
        failpoint("local.unlisted")
        shutil.rmtree(doomed)

    def quarantine(self, step: int, label: str = "invalid") -> str:
        """Rename the directory to `checkpoint-<step>.<label>`, with a number if that exists."""
        path = self.directory(step)
        number = 0
        while True:
            aside = path.with_name(f"{path.name}.{label}" + (f"-{number}" if number else ""))
            if not aside.exists():
                path.rename(aside)
                fsync_directory(self.root)
                return str(aside)
            number += 1

    def quarantined(self) -> list[str]:
        """Return the names of quarantined directories."""
        return [name for name in self._names() if _QUARANTINED.match(name)]

    def take_back(self, name: str) -> int | None:
        """Rename the directory."""
        match = _QUARANTINED.match(name)
        assert match is not None
        step = int(match.group(1))
        if self.directory(step).exists():
            return None
        (self.root / name).rename(self.directory(step))
        fsync_directory(self.root)
        return step

    def sweep(self) -> list[str]:
        """Remove temporary directories and files."""
        # This process may be writing its restart state now.
        ours = f"{LOCAL_RESTART_STATE}.{os.getpid()}.tmp"
        swept = [
            name
            for name in self._names()
            if ((match := _TEMPORARY.match(name)) and self._claim.outlives(int(match.group(1))))
            or (_TEMPORARY_STATE.match(name) and name != ours)
            or _REMOVING.match(name)
        ]
        if swept:
            # As in `remove`, whose writer may have died before.
            fsync_directory(self.root)
        for name in swept:
            path = self.root / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return swept

    def _manifest(self, step: int) -> Manifest:
        path = self.directory(step)
        try:
            if not stat.S_ISREG((path / MANIFEST_NAME).lstat().st_mode):
                raise InvalidCheckpoint(str(path), f"{MANIFEST_NAME} is not a regular file")
            data = (path / MANIFEST_NAME).read_bytes()
        except FileNotFoundError:
            raise InvalidCheckpoint(str(path), f"no {MANIFEST_NAME}: it was never committed") from None
        except OSError as error:
            # On NFS, what another node has just removed is stale.
            if error.errno in AWAY_ERRNOS and step in self._listed():
                raise
            if isinstance(error, PermissionError):
                raise ForeignCheckpoint(str(path), "it may not be read: another user has written it") from None
            raise InvalidCheckpoint(str(path), f"{MANIFEST_NAME} cannot be read ({error.strerror})") from None
        return Manifest.from_json(data, str(path))

    def _put_fence(self, fence: Fence) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f"{_FENCE_NAME}.{fence.attempt}.tmp"
        replace_file(self.root / _FENCE_NAME, fence.to_json(), temporary, lambda: failpoint("fence.written"))

    def _sizes(self, step: int | None = None) -> dict[str, int]:
        sizes = {}
        for number in [step] if step is not None else self._listed():
            # A directory without files is named like a checkpoint, too.
            sizes[f"{CHECKPOINT_PREFIX}{number}/"] = 0
            try:
                _add_sizes(self.directory(number), f"{CHECKPOINT_PREFIX}{number}/", sizes)
            except OSError:
                # On NFS, what another node has just removed is stale.
                if number in self._listed():
                    raise
        return sizes

    def _steps(self, sizes: Mapping[str, int]) -> set[int]:
        # Not listed again: what has been committed since would seem to lack its files.
        return {int(name.partition("/")[0].removeprefix(CHECKPOINT_PREFIX)) for name in sizes}

    def _listed(self) -> list[int]:
        return [int(match.group(1)) for name in self._names() if (match := _CHECKPOINT.match(name))]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))  # noqa: PTH208 - names, not paths
        except FileNotFoundError:
            return []


def open_location(location: str) -> LocalStorage:
    """Open a path or a `file://` URL.

    Raises:
        ValueError: The URL names no absolute path.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return LocalStorage(Path(location))
    if not rest.startswith("/"):
        raise ValueError(f"location {location!r} is not allowed: write {scheme}:///path, with three slashes")
    return LocalStorage(Path(rest))
