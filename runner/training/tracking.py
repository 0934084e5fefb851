"""Aim for a run with many attempts: one Aim run, each step once, without delaying training."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from checkpointing.host.environment import not_installed, rank_settings
from runner.training.callbacks import perplexities

logger = logging.getLogger(__name__)

# Entries that wait while the repository is slow; further ones are dropped.
_MAX_WAITING = 1000
# The end of training waits for a repository as long as it makes progress: at most these seconds without any, and these
# in all.
_PATIENCE_S = 10.0
_LIMIT_S = 120.0
# Earlier log entries that are tracked again, because a killed rank loses what its thread had not written.
_NUM_REPEATED = 100
_HASH_LENGTH = 24
_SUBSETS = ("eval", "test", "train")


class AimTracker(TrainerCallback):
    """Tracks the metrics of rank 0 in Aim.

    A thread does everything that touches the repository; its first problem is logged, and training continues.

    Aim itself would create a new run at every restart. This run has a hash of the run's lineage, which is stored with
    the checkpoints, so every attempt finds it again on any node. A point that is tracked again after a rollback
    replaces the first one.
    """

    def __init__(self, repo: str, experiment: str, location: str) -> None:
        """Prepare to track in a folder or at aim://host:port; ImportError where Aim is not installed."""
        if importlib.util.find_spec("aim") is None:
            raise ImportError(f"tracking.aim_repo is set, but {not_installed('Aim', 'aim')}")
        self._repo, self._experiment, self._location = repo, experiment, location
        settings = rank_settings()
        self._lineage = settings.lineage
        self._hash = hashlib.sha256(self._lineage.encode()).hexdigest()[:_HASH_LENGTH]
        self._attempt = settings.attempt
        self._waiting: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._reported = False
        # Set by the thread: whether it has imported Aim, and how much it has done since.
        self._imported = threading.Event()
        self._num_done = 0

    # -- in the training thread ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the thread, and repeat the latest entries of the history."""
        step, options = state.global_step, args.to_sanitized_dict()
        self._thread = threading.Thread(target=self._work, name="aim", daemon=True)
        self._thread.start()
        self._do(lambda run: run.set("hparams", options, strict=False))
        how = f"resumed from step {step}" if step else "started"
        self._do(lambda run: run.log_info(f"attempt {self._attempt} {how}"))
        for entry in state.log_history[-_NUM_REPEATED:]:
            self._track({**entry, **perplexities(entry)}, entry["step"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Track a log entry."""
        self._track(logs or {}, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the checkpoint."""
        step = state.global_step
        self._do(lambda run: run.log_info(f"checkpoint of step {step}"))

    def close(self, patience_s: float = _PATIENCE_S, limit_s: float = _LIMIT_S) -> None:
        """Write the waiting entries.

        Args:
            patience_s: Seconds to wait without progress. Importing Aim does not count: on a busy machine with cold
                caches it takes longer than a short training.
            limit_s: Seconds to wait in all.
        """
        if self._thread is None:
            return
        self._do(None)
        ends_at = time.monotonic() + limit_s
        self._imported.wait(limit_s)
        while self._thread.is_alive():
            num_done = self._num_done
            self._thread.join(max(min(patience_s, ends_at - time.monotonic()), 0))
            if self._num_done == num_done or time.monotonic() >= ends_at:
                break
        if self._thread.is_alive():
            self._report(f"{self._repo} did not accept all points before training ended")

    def _track(self, entry: dict[str, Any], step: int) -> None:
        points = []
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                subset, _, rest = name.partition("_")
                points.append((rest, value, {"subset": subset}) if rest and subset in _SUBSETS else (name, value, {}))
        epoch = entry.get("epoch")

        def track(run: Any) -> None:
            for name, value, context in points:
                run.track(value, name=name, step=step, epoch=epoch, context=context)

        self._do(track)

    def _do(self, what: Callable[[Any], None] | None) -> None:
        try:
            self._waiting.put_nowait(what)
        except queue.Full:
            self._report(f"{self._repo} is too slow; points are dropped")

    def _report(self, problem: str) -> None:
        if not self._reported:
            self._reported = True
            logger.warning("tracking: %s; training continues", problem)

    # -- in its thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._import()
            run = self._open()
        except Exception as error:
            self._report(f"{self._repo} cannot be used ({type(error).__name__}: {error})")
            return
        finally:
            self._imported.set()
        while (what := self._waiting.get()) is not None:
            self._try(functools.partial(what, run))
            self._num_done += 1
        self._try(run.close)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._report(f"{self._repo} refuses ({type(error).__name__}: {error})")

    def _import(self) -> None:
        """Import Aim, which takes seconds, while training continues."""
        importlib.import_module("aim")
        self._imported.set()

    def _open(self) -> Any:
        from aim import Repo, Run
        from aim.sdk import base_run

        if "://" not in self._repo:
            self._make_repository()
            self._num_done += 1
        exists = Repo.from_path(self._repo).run_exists(self._hash)
        # Aim has no argument for the hash of a new run.
        base_run.generate_run_hash = lambda: self._hash
        # A killed rank may have left its lock; there is only one tracker per run, so it can be taken over. If the rank
        # was killed before it made the run, the lock may be incomplete, and Aim fails on that unless it is forced.
        run = Run(self._hash if exists else None, repo=self._repo, force_resume=True, capture_terminal_logs=False)
        self._num_done += 1
        run.experiment = self._experiment
        run["runner"] = {"run": self._lineage, "checkpoints": self._location, "attempts": self._attempt}
        return run

    def _make_repository(self) -> None:
        """Create the repository atomically, because Aim cannot open one that a killed rank left incomplete."""
        from aim.sdk.repo import Repo
        from aim.sdk.utils import clean_repo_path, get_aim_repo_name

        target = Path(clean_repo_path(self._repo)) / get_aim_repo_name()
        if target.exists():
            return
        own = target.parent / f".aim-{self._hash}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        Repo(str(own), init=True)
        # Another run may have created the repository first.
        with contextlib.suppress(OSError):
            (own / target.name).rename(target)
        shutil.rmtree(own, ignore_errors=True)
