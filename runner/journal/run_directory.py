"""The folder of a run: the paths in it, the run's identity, and the lock that admits one runner."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing.host import locking
from checkpointing.host.own_files import make_own_folder
from checkpointing.storage.durable import fsync_directory, replace_file, write_file
from runner.errors import RunBusy, UsageError, unusable
from runner.journal.journal import JOURNAL_NAME

# Seconds for a runner on another machine to end.
_PATIENCE_S = 120.0
# Whose logs are kept; a run on spot instances may have thousands.
_KEPT_ATTEMPTS = 100


def hold_lock(
    path: Path,
    what: str,
    option: str,
    notify: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
    patience_s: float | None = None,
) -> tuple[int, bool]:
    """Take a runner's lock, as `RunDirectory.lock` does.

    Args:
        path: The lock file, which is created if needed.
        what: What the holder of such a lock does, for messages.
        option: The option that chooses another folder or location.
        notify: Called with messages for the user.
        cancelled: Called while waiting; the wait ends once it returns True.
        patience_s: Seconds to wait for a runner on another machine (default 120).

    Returns:
        A descriptor that holds the lock as long as it is open, and whether the lock was taken.

    Raises:
        RunBusy: A runner on this machine holds it.
        OSError: The file cannot be written.
    """
    fd = locking.open_lock(path)
    deadline, notified = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s), False
    while not locking.try_lock(fd):
        holder = locking.holder(fd)
        if not locking.is_elsewhere(holder):
            os.close(fd)
            raise RunBusy(f"another runner ({holder}) {what}; stop it first, or choose another {option}")
        if not notified:
            notified = True
            notify(f"a runner on another machine ({holder}) {what}; waiting for it to end")
        if time.monotonic() >= deadline or cancelled():
            notify("it has not ended; continuing, and fencing it off")
            return fd, False
        time.sleep(0.2)
    return fd, True


def _whose(path: Path, error: OSError) -> str:
    """Return to whom a file belongs that this user may not open, and what to do."""
    if not isinstance(error, PermissionError):
        return ""
    owner = "another user"
    with contextlib.suppress(OSError, KeyError):
        owner = pwd.getpwuid(path.stat().st_uid).pw_name
    return f"; it belongs to {owner}: start the run as that user, give the files to yours, or choose another folder"


class RunDirectory:
    """Paths inside `output_dir`.

    Attributes:
        config: The resolved configuration.
        logs: Folder for the ranks' output and stacks.
        requests: Folder for the files that `runner save` and `runner stop` make.
        cache: Folder for prepared data.
        best_model: Folder of the bundled job's best model.
        job: The recorded `JobIdentity`.
        lock_path: The file that a runner locks.
        is_locked: Whether this process holds the lock; False as well if a runner on another machine has not ended in
            time.
    """

    def __init__(self, root: str, node_rank: int = 0) -> None:
        """Compute the paths, and create nothing; all nodes but the first have records in a folder of their own."""
        self.root = Path(root).absolute()
        self._own = self.root if node_rank == 0 else self.root / f"node-{node_rank}"
        self.config = self._own / "config.yaml"
        self.journal = self._own / JOURNAL_NAME
        self.logs = self._own / "logs"
        self.requests = self.root / "requests"
        self.cache = self.root / "cache"
        self.best_model = self.root / "best_model"
        self._identity = self.root / "run.json"
        self.job = self._own / "job.json"
        self.lock_path = self._own / ".runner.lock"
        self._lock_fd: int | None = None
        self.is_locked = False

    def create(self) -> None:
        """Create the folders; UsageError or StorageFailed if `output_dir` cannot be written."""
        try:
            make_own_folder(self.logs, parents=True)
        except OSError as error:
            raise unusable(f"output_dir={str(self.root)!r} cannot be used: {error.strerror}", error) from None

    def lock(
        self, notify: Callable[[str], None] = lambda text: None, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Become the only runner of this run, until this process ends; see `hold_lock`.

        Another runner on this machine is a mistake of the user. A runner on another machine may belong to a node that
        the cluster has given up, or to a pod that is about to end: this call waits for it, and then relies on the
        fence, which works without the lock.

        Raises:
            RunBusy: Another runner works on this run.
            UsageError: `output_dir` cannot be written.
            StorageFailed: Its file system does not work.
        """
        try:
            what = f"works on {self.root}"
            self._lock_fd, self.is_locked = hold_lock(self.lock_path, what, "--output-dir", notify, cancelled)
        except OSError as error:
            path = Path(error.filename or self.lock_path)
            what = "cannot be written" if path == self.root else f"{path} cannot be written"
            text = f"output_dir={str(self.root)!r}: {what}: {error.strerror}{_whose(path, error)}"
            raise unusable(text, error) from None

    def run_id(self) -> str:
        """Return the run's identity, which is created on first use; UsageError if its file is damaged."""
        try:
            run_id = json.loads(self._identity.read_text())["run_id"]
            # It becomes a part of every manifest, message and tracker.
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
        # Several nodes may do this at once: the first link wins, the others read it.
        try:
            self._identity.hardlink_to(temporary)
        except FileExistsError:
            pass
        except OSError:
            temporary.rename(self._identity)  # a volume without hard links, which only one node can use safely
        temporary.unlink(missing_ok=True)
        # Checkpoints contain it, so it must survive every power cut that they survive.
        fsync_directory(self.root)
        return self.run_id()

    def write_config(self, text: str) -> None:
        """Write the resolved configuration, for the ranks, the other commands, and the next start to compare with."""
        replace_file(self.config, text.encode(), self.config.with_name(f".{self.config.name}.tmp"), private=True)

    def remove_old_logs(self, attempt: int) -> None:
        """Remove the logs of attempts long before this one; there may be many, on a slow volume."""
        for path in self.logs.glob("attempt-*"):
            number = path.name.removeprefix("attempt-")
            # The first one says how the run began.
            if number.isdecimal() and 1 < int(number) <= attempt - _KEPT_ATTEMPTS:
                shutil.rmtree(path, ignore_errors=True)

    def move_aside(self, checkpoints: Sequence[Path]) -> str:
        """Move an earlier run's records and tiers, the nearest first, to a folder `previous-N`; return its path."""
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
