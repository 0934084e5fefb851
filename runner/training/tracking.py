"""Aim, for a run of many attempts: one Aim run, each step once, and never in training's way."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from checkpointing.agent.client import ATTEMPT_ENV
from checkpointing.environment import LINEAGE_ENV
from checkpointing.extras import not_installed
from runner.training.callbacks import perplexities

logger = logging.getLogger(__name__)

# What waits while the repository is slow; more is dropped.
_MAX_WAITING = 1000
# The end of training waits for a repository that takes nothing for so long, and for one that goes on taking things for
# `_LIMIT_S` in all.
_PATIENCE_S = 10.0
_LIMIT_S = 120.0
# Of what was logged before: a killed rank takes along what its thread had not written.
_NUM_REPEATED = 100
_HASH_LENGTH = 24
_SUBSETS = ("eval", "test", "train")


class AimTracker(TrainerCallback):
    """For rank 0. A thread does all that touches the repository; whatever goes wrong there is said once.

    Aim itself would make a new run at every restart. Ours has a hash made of the run's lineage, which is kept beside
    the checkpoints: every attempt finds it again, on whatever machine. A point that is tracked a second time, after a
    rollback, replaces the first one.
    """

    def __init__(self, repo: str, experiment: str, location: str) -> None:
        """
        Args:
            repo: a folder, or aim://host:port.
            location: where the run's checkpoints lie.

        Raises:
            ImportError: Aim is not installed.
        """
        if importlib.util.find_spec("aim") is None:
            raise ImportError(f"tracking.aim_repo is set, but {not_installed('Aim', 'aim')}")
        self._repo, self._experiment, self._location = repo, experiment, location
        self._lineage = os.environ.get(LINEAGE_ENV, "")
        self._hash = hashlib.sha256(self._lineage.encode()).hexdigest()[:_HASH_LENGTH]
        self._attempt = int(os.environ.get(ATTEMPT_ENV, "0"))
        self._waiting: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._told = False
        # Of the thread: whether it has Aim, and how often it has got on since.
        self._imported = threading.Event()
        self._num_done = 0

    # -- in training's thread ------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, options = state.global_step, args.to_sanitized_dict()
        self._thread = threading.Thread(target=self._work, name="aim", daemon=True)
        self._thread.start()
        self._do(lambda run: run.set("hparams", options, strict=False))
        how = f"goes on from step {step}" if step else "begins"
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
        self._track(logs or {}, state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        self._do(lambda run: run.log_info(f"checkpoint of step {step}"))

    def close(self, patience_s: float = _PATIENCE_S, limit_s: float = _LIMIT_S) -> None:
        """Write what is waiting.

        Args:
            patience_s: how long to wait while nothing is written. Importing Aim does not count: that is work of this
                machine, which ends, and on a busy machine with cold caches it takes longer than a short training.
            limit_s: how long to wait in all.
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
            self._tell(f"{self._repo} has not taken everything before training ended")

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
            self._tell(f"{self._repo} does not keep up; points are dropped")

    def _tell(self, problem: str) -> None:
        if not self._told:
            self._told = True
            logger.warning("tracking: %s; training goes on", problem)

    # -- in the thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._write()
        finally:
            self._imported.set()

    def _write(self) -> None:
        try:
            self._import()
            run = self._open()
        except Exception as error:
            self._tell(f"{self._repo} cannot be used ({type(error).__name__}: {error})")
            return
        while (what := self._waiting.get()) is not None:
            try:
                what(run)
            except Exception as error:
                self._tell(f"{self._repo} refuses ({type(error).__name__}: {error})")
            self._num_done += 1
        try:
            run.close()
        except Exception as error:
            self._tell(f"{self._repo} refuses ({type(error).__name__}: {error})")

    def _import(self) -> None:
        """Import Aim, which takes seconds, beside training."""
        importlib.import_module("aim")
        self._imported.set()

    def _open(self) -> Any:
        from aim import Repo, Run
        from aim.sdk import base_run

        if "://" not in self._repo:
            self._make_repository()
            self._num_done += 1
        exists = Repo.from_path(self._repo).run_exists(self._hash)
        # A run that is new gets a hash of Aim's choice; there is no argument for it.
        base_run.generate_run_hash = lambda: self._hash
        # A killed rank has left its lock, and no other one lives. It may be the lock of a run that it had no time to
        # make, and half written: Aim fails on that unless it is forced.
        run = Run(self._hash if exists else None, repo=self._repo, force_resume=True, capture_terminal_logs=False)
        self._num_done += 1
        run.experiment = self._experiment
        run["runner"] = {"run": self._lineage, "checkpoints": self._location, "attempts": self._attempt}
        return run

    def _make_repository(self) -> None:
        """Whole, or not at all: a rank may be killed meanwhile, and Aim never opens half of one."""
        from aim.sdk.repo import Repo
        from aim.sdk.utils import clean_repo_path, get_aim_repo_name

        target = Path(clean_repo_path(self._repo)) / get_aim_repo_name()
        if target.exists():
            return
        own = target.parent / f".aim-{self._hash}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        Repo(str(own), init=True)
        # Another run may have been first: its repository is as good.
        with contextlib.suppress(OSError):
            (own / target.name).rename(target)
        shutil.rmtree(own, ignore_errors=True)
