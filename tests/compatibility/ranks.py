"""What runs in the ranks of a case: recording what training sees and ends with, and dying on demand."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from compatibility.table import MAX_STEPS, SAVE_STEPS, Case
from transformers import TrainerCallback

from checkpointing import CheckpointManager
from checkpointing.errors import CheckpointError
from checkpointing.transformers import resilient

_COMMIT_TIMEOUT_S = 5.0
_EARLIER_COMMIT_TIMEOUT_S = 1.0
# Of log entries: what a clock has a part in.
_TIMES = ("time", "per_second", "total_flos")


class Mismatch(Exception):
    """A case found that two things differ that must be equal."""


@dataclass(frozen=True)
class Order:
    """What a rank is to run; sent by the harness as JSON.

    Attributes:
        variant: "stock", "undisturbed" or "killed".
        attempt: number of restarts before this one.
        kill: stage and number of finished steps at which the ranks die; None: never.
        saved: step whose checkpoint must have been committed by then.
    """

    case: str
    variant: str
    folder: str
    attempt: int = 0
    kill: tuple[int, int] | None = None
    saved: int = 0


@dataclass
class Run:
    """One rank of one start of a case."""

    order: Order
    rank: int
    world_size: int
    stage: int = -1
    result: dict[str, Any] = field(default_factory=dict)
    location: Path = Path()

    @property
    def folder(self) -> Path:
        """Kept over restarts; another one for each variant."""
        return Path(self.order.folder)

    @property
    def output_dir(self) -> str:
        return str(self.folder / "output")

    @property
    def is_resilient(self) -> bool:
        return self.order.variant != "stock"

    @property
    def is_restarted(self) -> bool:
        return self.order.attempt > 0

    # -- trainers ------------------------------------------------------------------------------------------------

    def train(self, trainer: Any, *, resume_from: str | None = None, **options: Any) -> Any:
        """Train to the end, with `resilient` unless this is the stock variant; returns the trainer."""
        self.begin_stage(trainer.args.output_dir)
        cls = type(trainer)
        # As an override of the user's: below what `resilient` puts in front.
        trainer.__class__ = type(cls.__name__, (_RecordingMixin, cls), {"_recording_run": self})
        trainer.add_callback(_KillCallback(self))
        if self.is_resilient:
            trainer = resilient(trainer, **options)
        trainer.train(resume_from_checkpoint=resume_from)
        history = [
            {name: value for name, value in entry.items() if not any(part in name for part in _TIMES)}
            for entry in trainer.state.log_history
        ]
        self.finish(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            losses=[entry for entry in history if entry.keys() - {"epoch", "step"}],
            global_step=trainer.state.global_step,
        )
        return trainer

    # -- loops ---------------------------------------------------------------------------------------------------

    def manager(self, **options: Any) -> Any:
        """Begin a stage with a `CheckpointManager` over `output_dir`."""
        location = options.pop("location", self.output_dir)
        self.begin_stage(location)
        return CheckpointManager(location, **{"save_steps": SAVE_STEPS, **options})

    def steps(
        self,
        manager: CheckpointManager,
        batches: Callable[[], Iterable[Any]] = lambda: itertools.repeat(None),
        total: int = MAX_STEPS,
    ) -> Iterator[tuple[int, Any]]:
        """Steps from where the manager resumes, each with a batch; the caller calls `manager.step`.

        Args:
            batches: called once, after `manager.resume`.
        """
        steps = range(manager.resume(), total)
        for step, batch in zip(steps, batches(), strict=False):
            self.step_begins(step)
            if batch is not None:
                self.saw(step, "batch", batch)
            yield step, batch

    # -- recording -----------------------------------------------------------------------------------------------

    def begin_stage(self, location: str) -> None:
        self.stage += 1
        self.location = Path(location)

    def step_begins(self, step: int) -> None:
        """To be called before each optimizer step, with the number of steps done: here ranks are killed."""
        self.saw(step, "begin", None)
        stage, kill_step = self.order.kill or (-1, -1)
        if stage == self.stage and self.order.saved - 1 == step >= SAVE_STEPS:
            # Steps of milliseconds are shorter than a commit, and a save during the previous commit is skipped.
            self._await_checkpoint(step + 1 - SAVE_STEPS, _EARLIER_COMMIT_TIMEOUT_S)
        if (stage, kill_step) == (self.stage, step):
            self._await_checkpoint(self.order.saved, _COMMIT_TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGKILL)

    def _await_checkpoint(self, step: int, timeout_s: float) -> None:
        path, until = self.location / f"checkpoint-{step}", time.monotonic() + timeout_s
        while step and not path.is_dir():
            if time.monotonic() > until:
                print(f"compatibility: {path.name} was not committed in time", flush=True)
                break
            time.sleep(0.02)

    def saw(self, step: int, kind: str, value: Any) -> None:
        """Record what a step works on."""
        entry = [self.order.attempt, self.stage, step, kind, digest(value)]
        with (self.folder / f"seen-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def finish(self, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, **others: Any) -> None:
        """Record what a stage ends with.

        Args:
            model, optimizer: a module and an optimizer, or lists of them.
            others: anything that is compared by digest, such as losses and averages.
        """
        prefix = f"stage {self.stage}/" if self.stage else ""
        parts: dict[str, Any] = {}
        for number, module in enumerate(model if isinstance(model, list) else [model]):
            if module is not None:
                parts |= {f"parameters/{number}/{name}": value for name, value in module.named_parameters()}
                parts |= {f"buffers/{number}/{name}": value for name, value in module.named_buffers()}
        for number, one in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
            if one is not None:
                parts |= dict(_flattened(f"optimizer/{number}", one.state_dict()))
        if scheduler is not None:
            parts |= dict(_flattened("scheduler", scheduler.state_dict()))
        parts |= {"rng/python": random.getstate(), "rng/numpy": np.random.get_state()}
        parts["rng/torch"] = torch.random.get_rng_state()
        for name, value in others.items():
            parts |= dict(_flattened(name, value))
        self.result |= {prefix + name: digest(value) for name, value in parts.items()}

    def initialize(self) -> None:
        """Make the process group, where there is more than one rank."""
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def mean(self, value: float) -> float:
        """Over all ranks."""
        total = torch.tensor(value)
        if self.world_size > 1:
            dist.all_reduce(total)
        return float(total) / self.world_size

    def expect_equal(self, what: str, left: Any, right: Any) -> None:
        """
        Raises:
            Mismatch: they differ.
        """
        ones, others = dict(_flattened(what, left)), dict(_flattened(what, right))
        for name in [*ones, *(others.keys() - ones.keys())]:
            if name not in ones or name not in others or digest(ones[name]) != digest(others[name]):
                shown = [repr(side.get(name, "nothing"))[:80] for side in (ones, others)]
                raise Mismatch(f"{name}: {shown[0]} against {shown[1]}")


class _RecordingMixin:
    """Put in front of a trainer's class, as an override of the user's would be."""

    _recording_run: Run

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._recording_run.saw(self.state.global_step, "batch", inputs)  # type: ignore[attr-defined]
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self._recording_run.saw(self.state.global_step, "inputs", inputs)  # type: ignore[attr-defined]
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


class _KillCallback(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.step_begins(state.global_step)


def _flattened(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples, by path."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flattened(f"{path}/{key}", part)
    elif isinstance(value, (list, tuple)) and value:
        for number, part in enumerate(value):
            yield from _flattened(f"{path}/{number}", part)
    else:
        yield path, value


def digest(value: Any) -> str:
    """Of any nest of containers, tensors, arrays and plain values; equal only for equal bits."""
    state = hashlib.blake2b(digest_size=8)
    _feed(state.update, value)
    return state.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.is_sparse:
            tensor = tensor.coalesce()
            _feed(update, [tensor.indices(), tensor.values(), list(tensor.shape)])
            return
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "dequantize"):
            tensor = tensor.dequantize()
        tensor = tensor.contiguous().cpu()
        update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            update(repr(key).encode())
            _feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        update(f"[{len(value)}".encode())
        for part in value:
            _feed(update, part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(update, {one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    elif isinstance(value, np.generic):
        # One that comes back as a Python number is the same number.
        _feed(update, value.item())
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        update(repr(value if abs(value) > 2**52 else float(value)).encode())
    elif callable(value) or " at 0x" in repr(value):
        update(type(value).__name__.encode())
    else:
        update(repr(value).encode())


def run_case(case: Case, order: Order) -> int:
    """Run one rank; returns its exit status. What it found is in `result-RANK.json`."""
    run = Run(order, int(os.environ.get("RANK", "0")), case.ranks)
    document: dict[str, Any]
    try:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        case.body(run)
        document = {"result": run.result}
    except BaseException as error:
        trace = traceback.format_exc()
        print(trace, flush=True)
        frames = traceback.extract_tb(error.__traceback__)
        ours = any(f"{os.sep}checkpointing{os.sep}" in frame.filename for frame in frames[-1:])
        document = {
            "error": f"{type(error).__name__}: {error}",
            "refused": isinstance(error, CheckpointError) or (isinstance(error, ValueError) and ours),
            "mismatch": isinstance(error, Mismatch),
            "traceback": trace[-1500:],
        }
    path = run.folder / f"result-{run.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(document))
    path.with_suffix(".tmp").rename(path)
    if "error" not in document and dist.is_initialized():
        dist.destroy_process_group()
    return 1 if "error" in document else 0
