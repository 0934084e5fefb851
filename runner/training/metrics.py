"""Metrics of the bundled job: what is measured while it trains, and Aim for a run with many attempts.

In Aim there is one run, with each step once, and training is not delayed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
import math
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from checkpointing.host.environment import not_installed, rank_settings
from checkpointing.process import device

# Dense bf16 or fp16 operations per second, from NVIDIA's data sheets. The first name that is part of a device's name
# applies.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "T4": 65e12,
}


class MetricsCallback(TrainerCallback):
    """Adds metrics to every log entry of rank 0 that the Trainer does not measure.

    It must precede callbacks that pass entries to a tracker. Checkpoints do not contain these metrics, so that the
    `log_history` of a resumed run equals that of an uninterrupted run.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._data_wait_s, self._stall_s, self._num_steps = 0.0, 0.0, 0
        self._attempt = rank_settings().attempt
        self._lost_steps = 0

    def watch(self, trainer: Any) -> None:
        """Measure how long a trainer waits for its batches, and become its first callback."""
        handler = trainer.callback_handler
        handler.callbacks.insert(0, handler.callbacks.pop(handler.callbacks.index(self)))
        self._trainer, draw = trainer, trainer.get_batch_samples

        def drawn(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return draw(*args, **kwargs)
            finally:
                self._data_wait_s += time.perf_counter() - began

        trainer.get_batch_samples = drawn

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compute the recomputed steps of the run."""
        settings = rank_settings()
        self._lost_steps = settings.lost_steps + max(settings.reached_step - state.global_step, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self._num_steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add the metrics to a log entry."""
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            logs |= perplexities(logs)
        elif "loss" in logs:
            measured = {
                **perplexities(logs),
                **self._speed(logs, args.world_size),
                **_memory(),
                "attempt": self._attempt,
                "nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
                "lost_steps": self._lost_steps,
            }
            stall_s = self._trainer._manager.stall_s
            if self._num_steps:
                measured["data_wait_s"] = round(self._data_wait_s / self._num_steps, 5)
                measured["checkpoint_stall_s"] = round((stall_s - self._stall_s) / self._num_steps, 5)
            self._data_wait_s, self._stall_s, self._num_steps = 0.0, stall_s, 0
            measured |= _communication(self._trainer.model_wrapped)
            logs |= measured

    def _speed(self, logs: dict[str, float], world_size: int) -> dict[str, float]:
        """Return rates since the last entry; TRL counts the tokens of all ranks."""
        now, tokens, last = time.monotonic(), logs.get("num_tokens"), self._last
        if tokens is None:
            return {}
        self._last = (now, tokens)
        if last is None or now <= last[0]:
            return {}
        rate = (tokens - last[1]) / (now - last[0])
        speed = {"tokens_per_s": round(rate, 1), "tokens_per_s_per_rank": round(rate / world_size, 1)}
        peak = _peak_flops()
        if peak is not None:
            length = getattr(self._trainer.args, "max_length", None) or 0
            share = rate / world_size * flops_per_token(self._trainer.model, length) / peak
            speed["mfu"] = round(share, 4)
        return speed


def perplexities(logs: dict[str, Any]) -> dict[str, float]:
    """Return the perplexities (exponentials) of the losses in a log entry."""
    names = {"loss": "perplexity", "eval_loss": "eval_perplexity"}
    found = {name: logs[loss] for loss, name in names.items() if isinstance(logs.get(loss), (int, float))}
    return {name: round(math.exp(loss), 4) for name, loss in found.items() if loss < 700}


def flops_per_token(model: Any, length: int) -> float:
    """Estimate the operations of forward and backward pass per token (PaLM, arXiv 2204.02311, appendix B).

    These are 6 per parameter, and 12 x layers x width x tokens per sequence for attention. A frozen base counts fully.
    """
    # Multimodal models keep these numbers in the configuration of their text model.
    config = model.config.get_text_config()
    parameters = sum(map(_num_elements, model.parameters()))
    return float(6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length)


def _num_elements(parameter: Any) -> int:
    # bitsandbytes packs two 4-bit weights into a byte, and keeps the original shape.
    packed = getattr(parameter, "quant_state", None)
    return math.prod(packed.shape) if packed is not None else int(parameter.numel())


def _peak_flops() -> float | None:
    found = device.name_of() or ""
    # Whole words only: L40 contains L4.
    return next((flops for name, flops in _PEAK_FLOPS.items() if re.search(rf"\b{name}\b", found)), None)


def _memory() -> dict[str, float]:
    """Return the peak memory of this process so far in GB, and the utilisation of its GPU in percent."""
    busy = device.utilization_percent()
    utilization = {"gpu_utilization": busy} if busy is not None else {}
    return {"peak_memory_gb": round(device.peak_memory_bytes() / 1e9, 3), **utilization}


def _communication(model: Any) -> dict[str, float]:
    """Return the share of forward and backward pass in which a rank waits for gradients of others.

    DDP measures it in the first ten steps and in every hundredth one.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return {}
    data: dict[str, Any] = model._get_ddp_logging_data()
    forward, backward = data.get("avg_forward_compute_time", 0), data.get("avg_backward_compute_time", 0)
    communication = data.get("avg_backward_comm_time", 0)
    exposed = max(communication - data.get("avg_backward_compute_comm_overlap_time", 0), 0)
    total = forward + backward + exposed
    return {"communication_share": round(exposed / total, 4)} if total else {}


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
        """Write the waiting entries, for at most so many seconds without progress, and in all.

        Importing Aim does not count: on a busy machine with cold caches it takes longer than a short training.
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
