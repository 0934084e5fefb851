"""The folder of a run: names of what lies in it, its identity, and the lock that lets one runner work on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing import locking
from checkpointing.storage.direct_io import write_file
from checkpointing.storage.durable import fsync_directory
from runner.errors import RunBusy, UsageError
from runner.journal.journal import JOURNAL_NAME

# For a runner of another machine to end.
_PATIENCE_S = 120.0


def hold_lock(
    path: Path,
    what: str,
    option: str,
    tell: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
    patience_s: float | None = None,
) -> tuple[int, bool]:
    """Take a runner's lock; see `RunDirectory.lock`.

    Args:
        what: What the holder of such a lock does, for messages.
        option: The option that names another place.
        patience_s: How long to wait for a runner of another machine (default: 120).

    Returns:
        A descriptor that holds the lock as long as it is open, and whether it does.

    Raises:
        RunBusy: A runner of this machine holds it.
        OSError: The file cannot be written.
    """
    fd = locking.open_lock(path)
    deadline, told = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s), False
    while not locking.try_lock(fd):
        holder = locking.holder(fd)
        if not locking.is_elsewhere(holder):
            os.close(fd)
            raise RunBusy(f"another runner ({holder}) {what}; stop it first, or choose another {option}")
        if not told:
            told = True
            tell(f"a runner on another machine ({holder}) {what}; waiting for it to end")
        if time.monotonic() >= deadline or cancelled():
            tell("it has not ended; going on, and shutting it out")
            return fd, False
        time.sleep(0.2)
    return fd, True


class RunDirectory:
    """Paths inside `output_dir`."""

    def __init__(self, root: str, node_rank: int = 0) -> None:
        self.root = Path(root).absolute()
        # Nodes share a volume; each but the first keeps its own records beside the run's.
        self._own = self.root if node_rank == 0 else self.root / f"node-{node_rank}"
        self.config = self._own / "config.yaml"
        self.journal = self._own / JOURNAL_NAME
        self.logs = self._own / "logs"
        self.cache = self.root / "cache"
        self.best_model = self.root / "best_model"
        self._identity = self.root / "run.json"
        self.job = self._own / "job.json"
        self._lock_path = self._own / ".runner.lock"
        self._lock_fd: int | None = None
        # False, too, where a runner on another machine has not ended in time.
        self.is_locked = False

    def create(self) -> None:
        """Make the folders.

        Raises:
            UsageError: output_dir cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"output_dir={str(self.root)!r} cannot be used: {error.strerror}") from None

    def lock(
        self, tell: Callable[[str], None] = lambda text: None, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Become the only runner of this run, until this process ends.

        One of this machine that works on it is a mistake of somebody's. One of another machine may belong to a node
        that the cluster has given up, or to a pod that is about to end: it is waited for, and then left to the fence,
        which works without the lock. `tell` is told of it; `cancelled` ends the wait.

        Raises:
            RunBusy: another one is alive.
            UsageError: output_dir cannot be written.
        """
        try:
            what = f"works on {self.root}"
            self._lock_fd, self.is_locked = hold_lock(self._lock_path, what, "--output-dir", tell, cancelled)
        except OSError as error:
            raise UsageError(f"output_dir={str(self.root)!r} cannot be written: {error.strerror}") from None

    def run_id(self) -> str:
        """The run's identity, made on first use."""
        try:
            run_id = json.loads(self._identity.read_text())["run_id"]
            # It goes into every manifest, message and tracker.
            if not isinstance(run_id, str) or not re.fullmatch(r"[\w.-]{1,100}", run_id, re.ASCII):
                raise ValueError
            return run_id
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{self._identity} is damaged; delete it to give the run a new identity") from None
        run_id = uuid.uuid4().hex[:12]
        temporary = self._identity.with_suffix(f".{run_id}")
        write_file(temporary, [memoryview(json.dumps({"run_id": run_id}).encode() + b"\n")])
        # Several nodes may get here at once: the first link wins, the others read it.
        try:
            self._identity.hardlink_to(temporary)
        except FileExistsError:
            pass
        except OSError:
            temporary.rename(self._identity)  # a volume without hard links; one node is all it can serve safely
        temporary.unlink(missing_ok=True)
        # Checkpoints will bear it: it must not be lost to a power cut that they survive.
        fsync_directory(self.root)
        return self.run_id()

    def move_aside(self, checkpoints: Sequence[Path]) -> str:
        """Put an earlier run's records and folders of checkpoints into a folder of their own; returns its path."""
        number = 1
        while (aside := self.root / f"previous-{number}").exists():
            number += 1
        aside.mkdir(parents=True)
        for path in (self.config, self.job, self.journal, self.logs, self.best_model, self._identity):
            if path.exists():
                shutil.move(path, aside / path.name)
        for tier, path in zip(("checkpoints", "local-tier"), reversed(checkpoints), strict=False):
            if path.exists():
                shutil.move(path, aside / tier)
        self.create()
        return str(aside)
