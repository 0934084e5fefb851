"""What the Trainer's loop keeps: `trainer_state.json`, and its variables, in one small JSON file per rank."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerState

from checkpointing.data.dealing import StepLayout
from checkpointing.data.stream import StreamPosition
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import TRAINER_STATE_NAME, loop_state_name
from checkpointing.transformers.guards import whole

# How a run's steps were divided when it began, which is equally.
_LAYOUT = ("world_size", "batch_size", "accumulation")


def checked_directory(point: LoadedCheckpoint) -> str:
    """Check what the Trainer reads without checks (InvalidCheckpoint); return the directory to read it from."""
    state = point.json(TRAINER_STATE_NAME)
    with point.reading(TRAINER_STATE_NAME):
        read = TrainerState(**state)
        if not is_number(read.global_step) or read.global_step != point.step:
            raise ValueError(f"it is of step {read.global_step}")
        numbers = [read.epoch, read.best_metric, read.total_flos, read.num_input_tokens_seen]
        if not all(number is None or is_number(number) for number in numbers):
            raise ValueError("epoch, best_metric, total_flos or num_input_tokens_seen is not a number")
        if not isinstance(read.best_model_checkpoint, str | None):
            raise ValueError("best_model_checkpoint is not a path")
        if not isinstance(read.log_history, list) or not all(isinstance(entry, dict) for entry in read.log_history):
            raise ValueError("log_history is not a list of objects")
        if not isinstance(read.stateful_callbacks, dict):
            raise ValueError("stateful_callbacks is not an object")
    return str(point.directory)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float that `float` accepts."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def state_file(state: TrainerState) -> Callable[[], bytes]:
    """Copy the present state; return what writes the file as the Trainer does, while training continues."""
    taken = copy.copy(state)
    # The Trainer's own file is always that of rank 0; here it is of the first rank of the node that leads.
    taken.is_local_process_zero = taken.is_world_process_zero = True
    # The history only grows at its end: a new list of the same entries is enough.
    taken.log_history = list(state.log_history)
    taken.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return lambda: (json.dumps(dataclasses.asdict(taken), indent=2, sort_keys=True) + "\n").encode()


def evaluated_metrics(state: TrainerState) -> dict[str, float]:
    """Return what was evaluated at the present step."""
    entries = [entry for entry in state.log_history[-3:] if entry.get("step") == state.global_step]
    values = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


@dataclass
class LoopFigures:
    """Figures that the Trainer passes along as arguments, or counts per process instead of per run."""

    # Both of the last step, for a log entry at the epoch's end; at first those of the checkpoint.
    grad_norm: torch.Tensor | float | None = None
    learning_rate: float | None = None
    # The loss that the Trainer adds up is that of the steps from here on.
    loss_since: int = 0

    def update(self, grad_norm: Any, learning_rate: Any) -> None:
        """Take over the figures of a step; at an epoch's end, where none has set them, None keeps the last ones."""
        self.grad_norm = self.grad_norm if grad_norm is None else grad_norm
        self.learning_rate = self.learning_rate if learning_rate is None else learning_rate

    def mean_loss(self, total: float, step: int) -> float:
        """Return the mean loss of the run's steps, of which the Trainer knows those of the last process only."""
        return float(total) / max(step - self.loss_since, 0.001)


@dataclass(frozen=True)
class JobRecord:
    """What all ranks must know of a checkpoint before the data loader is made; in rank 0's loop state."""

    # How steps were divided when the run began.
    layout: StepLayout | None = None
    # See `job_of`.
    job: Mapping[str, Any] = field(default_factory=dict)
    # None if the data was not streamed.
    stream: StreamPosition | None = None
    # By a callback.
    ended: bool = False
    # What trackers call the run.
    run_name: str | None = None

    @classmethod
    def read(cls, point: LoadedCheckpoint) -> JobRecord | None:
        """Read a checkpoint's record; None if it has none."""
        name = loop_state_name(0)
        if not point.has(name):
            return None
        state = point.json(name)
        with point.reading(name):
            run_name = state.get("tracked_as")
            return cls(
                layout=_layout(state["made_for"]) if "made_for" in state else None,
                job=dict(state.get("job", {})),
                stream=StreamPosition.from_json(state["stream"]) if "stream" in state else None,
                ended=bool(state.get("ended")),
                run_name=run_name if isinstance(run_name, str) and run_name.isalnum() else None,
            )


@dataclass(frozen=True)
class LoopState:
    """The loop's variables of one rank, with the record of the job."""

    # Losses added up since the last log entry, and its step.
    tr_loss: torch.Tensor | float
    last_logged: int
    figures: LoopFigures = field(default_factory=LoopFigures)
    # Not filled in by `read`.
    record: JobRecord = JobRecord()
    # An evaluation was cut short, and is repeated by the resumed run.
    evaluation_due: bool = False
    # Floating point operations since the Trainer stored them, which it does at saves only.
    flos: float = 0
    total_loss: float = 0.0
    # None if losses are not checked.
    recent_losses: Sequence[float] | None = None
    # TRL's values since the last log entry, by name; None for trainers without them.
    metrics: Mapping[str, list[float]] | None = None
    train_tokens: float = 0

    @classmethod
    def capture(cls, trainer: Any, figures: LoopFigures, **fields: Any) -> LoopState:
        """Take the variables of a trainer's loop; `fields` are the others."""
        metrics = None
        if hasattr(trainer, "_metrics"):
            metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        return cls(
            # A copy: reading it now would wait for all work that is enqueued on the device.
            tr_loss=trainer._tr_loss.detach().clone(),
            last_logged=trainer._globalstep_last_logged,
            # All ranks together, here: the copying thread must not wait for other ranks' gradients.
            figures=dataclasses.replace(figures, grad_norm=whole(figures.grad_norm)),
            flos=trainer.current_flos,
            total_loss=trainer._total_loss_scalar,
            metrics=metrics,
            train_tokens=getattr(trainer, "_total_train_tokens", 0),
            **fields,
        )

    def to_bytes(self) -> bytes:
        """Return the file's contents; reads from the device."""
        record, figures = self.record, self.figures
        state: dict[str, Any] = {
            "tr_loss": float(self.tr_loss),
            "grad_norm": float(figures.grad_norm) if figures.grad_norm is not None else None,
            "last_logged": self.last_logged,
            **({"made_for": dict(zip(_LAYOUT, record.layout.to_list(), strict=True))} if record.layout else {}),
            "job": dict(record.job),
            "learning_rate": figures.learning_rate,
            "ended": record.ended,
        }
        if self.evaluation_due:
            state["evaluation_due"] = True
        state |= {"flos": self.flos, "total_loss": self.total_loss, "loss_since": figures.loss_since}
        if record.run_name is not None:
            state["tracked_as"] = record.run_name
        if record.stream is not None:
            state["stream"] = record.stream.to_json()
        if self.recent_losses is not None:
            state["recent_losses"] = list(self.recent_losses)
        if self.metrics is not None:
            state |= {"metrics": dict(self.metrics), "train_tokens": self.train_tokens}
        return json.dumps(state).encode()

    @classmethod
    def read(cls, point: LoadedCheckpoint, rank: int, world_size: int) -> LoopState | None:
        """Read what a checkpoint holds of a rank, or of rank 0 if it holds nothing of this one.

        The losses that the checkpoint's ranks had added up are divided among the ranks that there are now, so that the
        mean over the ranks stays the same.
        """
        name = next(filter(point.has, map(loop_state_name, (rank, 0))), None)
        if name is None:
            return None
        state = point.json(name)
        with point.reading(name):
            metrics = state.get("metrics")
            return cls(
                tr_loss=_share_of_losses(point, state, rank, world_size),
                last_logged=_number(state["last_logged"]),
                figures=LoopFigures(
                    _number_or_none(state.get("grad_norm")),
                    _number_or_none(state.get("learning_rate")),
                    # Older checkpoints have neither this nor `total_loss`.
                    _number(state.get("loss_since", point.step)),
                ),
                evaluation_due=bool(state.get("evaluation_due")),
                flos=_number(state.get("flos", 0)),
                total_loss=float(state.get("total_loss", 0.0)),
                recent_losses=[_number(loss) for loss in state.get("recent_losses", [])],
                metrics={name: _numbers(values) for name, values in metrics.items()} if metrics is not None else None,
                train_tokens=_number(state["train_tokens"]) if metrics is not None else 0,
            )

    def restore(self, trainer: Any) -> None:
        """Put the variables back into a trainer's loop; the figures are the caller's to continue with."""
        trainer._tr_loss += self.tr_loss
        trainer._total_loss_scalar = self.total_loss
        trainer._globalstep_last_logged = self.last_logged
        trainer.current_flos = self.flos
        if self.metrics is not None and hasattr(trainer, "_metrics"):
            trainer._metrics["train"].update(self.metrics)
            trainer._total_train_tokens = self.train_tokens


def _layout(counts: Mapping[str, Any]) -> StepLayout:
    return StepLayout.from_list([counts[name] for name in _LAYOUT])


def _share_of_losses(point: LoadedCheckpoint, state: Mapping[str, Any], rank: int, world_size: int) -> float:
    own = float(state["tr_loss"])
    # Virtual ranks have all ranks add the same up.
    if point.world_size == world_size or state.get("job", {}).get("virtual ranks") is not None:
        return own
    names = [name for other in range(rank, point.world_size, world_size) if point.has(name := loop_state_name(other))]
    return sum(float(point.json(name)["tr_loss"]) for name in names) * world_size / point.world_size


def _number(value: Any) -> Any:
    if not is_number(value):
        raise ValueError(f"{value!r} is not a number")
    return value


def _number_or_none(value: Any) -> Any:
    """Accept NaN and infinity as well: the last step's figures may be either."""
    if value is None or value != value or abs(value) == math.inf:
        return value
    return _number(value)


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is not a list")
    return [_number(value) for value in values]
