"""Aim for a run with many attempts: one Aim run, each step once, without delaying training."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from checkpointing.environment import rank_settings
from checkpointing.extras import not_installed
from runner.training.callbacks import perplexities

logger = logging.getLogger(__name__)

# Entries that wait while the repository is slow; further ones are dropped.
_MAX_WAITING = 1000
# Seconds that the end of training waits for the repository.
_PATIENCE_S = 10.0
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
        """Prepare tracking; the repository is opened when training begins.

        Args:
            repo: A folder, or aim://host:port.
            experiment: Name of the experiment.
            location: Location of the run's checkpoints.

        Raises:
            ImportError: Aim is not installed.
        """
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

    # -- in the training thread ----------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the thread, and repeat the latest entries of the history."""
        step, options = state.global_step, args.to_sanitized_dict()
        self._thread = threading.Thread(target=self._work, name="aim", daemon=True)
        self._thread.start()
        self._do(lambda run: run.set("hparams", options, strict=False))
        how = f"resumed from step {step}" if step else "started"
        self._do(lambda run: run.log_info(f"attempt {self._attempt} {how}"))
        for entry in state.log_history[-_NUM_REPEATED:]:
            self._track({**entry, **perplexities(entry)}, entry["step"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Track a log entry."""
        self._track(logs or {}, state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the checkpoint."""
        step = state.global_step
        self._do(lambda run: run.log_info(f"checkpoint of step {step}"))

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Write the waiting entries, for at most this many seconds."""
        if self._thread is None:
            return
        self._do(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._report(f"{self._repo} did not accept all points within {patience_s:.0f} s")

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
            run = self._open()
        except Exception as error:
            self._report(f"{self._repo} cannot be used ({type(error).__name__}: {error})")
            return
        while (what := self._waiting.get()) is not None:
            try:
                what(run)
            except Exception as error:
                self._report(f"{self._repo} refuses ({type(error).__name__}: {error})")
        try:
            run.close()
        except Exception as error:
            self._report(f"{self._repo} refuses ({type(error).__name__}: {error})")

    def _open(self) -> Any:
        # These imports take seconds, so they run in the thread.
        from aim import Repo, Run
        from aim.sdk import base_run

        if "://" not in self._repo:
            self._make_repository()
        exists = Repo.from_path(self._repo).run_exists(self._hash)
        # Aim has no argument for the hash of a new run.
        base_run.generate_run_hash = lambda: self._hash
        # A killed rank may have left its lock; there is only one tracker per run, so it can be taken over.
        run = Run(self._hash if exists else None, repo=self._repo, force_resume=exists, capture_terminal_logs=False)
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
