"""The Trainer's own trackers (`report_to`) over all attempts of a run: one tracker run, with each step logged once.

Without this, trackers begin another run whenever a process starts, and recomputed steps are plotted twice. Here every
attempt opens the run of the first one, queries which steps the tracker has, adds missing entries from the Trainer's
history (a killed process loses what it had not written), and logs only new entries.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import integration_utils as integrations

from checkpointing.manager.tracker_runs import (
    MLFLOW_TAG,
    STEP,
    Held,
    ProgramRuns,
    find_mlflow_run,
    held_in_files,
    note_steps,
    skip_rows,
)

logger = logging.getLogger("checkpointing")

# In every entry, also in two of one step.
_IN_EVERY_ENTRY = {"epoch"}

_Base: Any = TrainerCallback if TYPE_CHECKING else object


# Logs of a line for each step, which frameworks append to in the output folder: how a line says its step.
_STEP_LOGS: dict[str, Callable[[dict[str, Any]], int]] = {
    # LLaMA-Factory and ms-swift.
    "trainer_log.jsonl": lambda line: int(line["current_steps"]),
    "logging.jsonl": lambda line: int(str(line["global_step/max_steps"]).partition("/")[0]),
}


def drop_repeated_lines(folder: str, step: int) -> None:
    """Remove the lines of steps that a resumed run recomputes from the logs of frameworks, which append them again.

    Args:
        folder: The trainer's `output_dir`.
        step: The step that training resumes from.
    """
    for name, step_of in _STEP_LOGS.items():
        path = Path(folder) / name
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _is_before(line, step, step_of)]
        if len(kept) < len(lines):
            other = path.with_name(f".{name}.tmp")
            other.write_text("".join(kept), encoding="utf-8")
            other.replace(path)


def _is_before(line: str, step: int, step_of: Callable[[dict[str, Any]], int]) -> bool:
    try:
        return step_of(json.loads(line)) <= step
    except (ValueError, KeyError, TypeError):
        # A line of another kind; of a torn one nothing can be read.
        return line.endswith("\n")


def continue_trackers(callbacks: list[Any], run: str) -> bool:
    """Make the trackers among `callbacks` continue a run, named by letters and digits; return whether there are any."""
    found = False
    for callback in callbacks:
        if not isinstance(callback, _Continued):
            for name, mixin in _MIXINS.items():
                kind = getattr(integrations, name, None)
                if kind is not None and isinstance(callback, kind):
                    callback.__class__ = type(f"Continued{type(callback).__name__}", (mixin, type(callback)), {})
        if isinstance(callback, _Continued):
            callback.run_name, found = run, True
    return found


class _Continued(_Base):
    """Overrides that are put in front of a tracker's class."""

    run_name: str
    # Steps of each name that the tracker has; None if unknown, so that everything is logged.
    _held: Held | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Open the run, and log what it is missing."""
        self._held = None
        logs_here = state.is_world_process_zero and not state.is_hyper_param_search
        if logs_here:
            self._prepare(args, state)
        super().on_train_begin(args, state, control, **kwargs)
        if not logs_here:
            return
        try:
            self._held = self._find_held()
        except Exception as error:  # the tracker's own
            logger.warning(
                "%s: reading the tracker's entries failed: %s; all entries are logged", type(self).__name__, error
            )
        if self._held is not None:
            for entry in state.log_history:
                then = copy.copy(state)
                then.global_step = entry["step"]
                self.on_log(args, then, control, logs=dict(entry), **kwargs)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Log the values that the tracker does not have."""
        logs = {name: value for name, value in (logs or {}).items() if name != "step"}
        if self._held is not None:
            known = {name for name, value in logs.items() if self._holds(name, state.global_step, value)}
            logs = {name: value for name, value in logs.items() if name in _IN_EVERY_ENTRY or name not in known}
            if not logs.keys() - _IN_EVERY_ENTRY:
                return
        super().on_log(args, state, control, logs=logs, **kwargs)

    def _holds(self, name: str, step: int, value: Any) -> bool:
        return self._held is not None and step in self._held.get(self._called(name), ())

    def _called(self, name: str) -> str:
        """Return the tracker's name for an entry of the Trainer's log."""
        (called,) = integrations.rewrite_logs({name: None})
        return str(called)

    def _prepare(self, args: TrainingArguments, state: TrainerState) -> None:
        raise NotImplementedError

    def _find_held(self) -> Held | None:
        raise NotImplementedError


class _TensorBoard(_Continued):
    """One folder of event files; readers drop entries of an earlier file from the step at which a later file begins."""

    logging_dir: str | None
    _SummaryWriter: Any
    _is_new = False

    def _prepare(self, args: TrainingArguments, state: TrainerState) -> None:
        if self.tb_writer is not None:
            return  # the user's own
        self.logging_dir = self.logging_dir or str(Path(args.output_dir) / "runs" / self.run_name)
        self._is_new = not any(Path(self.logging_dir).glob("events.out.tfevents.*"))
        writer: Any = self._SummaryWriter
        if isinstance(writer, functools.partial):
            writer = writer.func
        # On a new machine everything is written again, from the Trainer's history.
        purge = {} if self._is_new else {"purge_step": state.global_step + 1}
        self._SummaryWriter = functools.partial(writer, **purge)

    def _find_held(self) -> Held | None:
        return {} if self._is_new else None


class _Wandb(_Continued):
    """Continued by the run's id. Offline, attempts are files of one run, which `wandb sync` sends one after another."""

    _wandb: Any
    # Ids of runs that this class has opened in this process.
    _opened: ClassVar[set[str]] = set()
    _last: tuple[int, dict[str, Any]] | None = None

    def _prepare(self, args: TrainingArguments, state: TrainerState) -> None:
        wandb = self._wandb = _own(self._wandb)
        run = os.environ.get("WANDB_RUN_ID") or self.run_name
        if wandb.run is not None and wandb.run.id in self._opened - {run}:
            # An earlier training of this script.
            wandb.finish()
            self._initialized = False
        if wandb.run is None:
            self._opened.add(run)
            resume = os.environ.get("WANDB_RESUME") or "allow"
            self._wandb = _Module(wandb, init=functools.partial(wandb.init, id=run, resume=resume))

    def _find_held(self) -> Held | None:
        run = self._wandb.run
        if run.id not in self._opened and not ProgramRuns.take(run.id):
            return None  # the script has opened it, under a name of its own
        if run.offline:
            held, rows = held_in_files(run)
            skip_rows(run, rows)
            return held
        last = run.summary.get(STEP)
        if not run.resumed or last is None:
            return {}
        # Of the last step some rows may not have arrived.
        self._last = int(last), dict(run.summary)
        return {name: range(int(last)) for name in self._last[1]}

    def _holds(self, name: str, step: int, value: Any) -> bool:
        if super()._holds(name, step, value):
            return True
        return self._last is not None and self._last[0] == step and self._last[1].get(self._called(name)) == value


class _Trackio(_Continued):
    """Continued by the run's name. A remote server cannot be queried."""

    _trackio: Any

    def _prepare(self, args: TrainingArguments, state: TrainerState) -> None:
        trackio = _own(self._trackio)
        name = args.run_name or self.run_name
        self._trackio = _Module(trackio, init=lambda **options: trackio.init(**options | {"name": name}))

    def _find_held(self) -> Held | None:
        from trackio.sqlite_storage import SQLiteStorage

        context = self._trackio.context_vars
        if context.current_space_id.get() is not None or context.current_server.get() is not None:
            return None
        held: dict[str, set[int]] = {}
        for row in SQLiteStorage.get_logs(context.current_project.get(), context.current_run.get().name):
            note_steps(held, row)
        return dict(held)


class _MLflow(_Continued):
    """Continued by a tag, since the server chooses a run's id."""

    _ml_flow: Any
    _resumed: str | None = None

    def _prepare(self, args: TrainingArguments, state: TrainerState) -> None:
        mlflow = self._ml_flow = _own(self._ml_flow)
        run = self._resumed = os.environ.get("MLFLOW_RUN_ID")
        if run is None:
            if (active := mlflow.active_run()) is not None:
                if ProgramRuns.take(active.info.run_id):
                    self._continue(mlflow, active.info.run_id)
                return  # the script has opened it
            if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
                # As MLflowCallback.setup does later; without the variable the script's choice counts.
                mlflow.set_experiment(name)
            run = self._resumed = find_mlflow_run(mlflow, self.run_name)
            if run is None:
                client, place = mlflow.MlflowClient(), mlflow.tracking.fluent._get_experiment_id()
                tags = {MLFLOW_TAG: self.run_name}
                run = client.create_run(place, tags=tags, run_name=args.run_name).info.run_id
        self._continue(mlflow, self._resumed, start_run=lambda nested=False, **_: mlflow.start_run(run, nested=nested))

    def _continue(self, mlflow: Any, resumed: str | None, **replaced: Callable[..., Any]) -> None:
        self._resumed = resumed
        if resumed is not None:
            # The parameters are those of the first attempt, and the server refuses others.
            replaced["log_params"] = lambda *args, **kwargs: None
        self._initialized = False
        self._ml_flow = _Module(mlflow, **replaced)

    def _find_held(self) -> Held | None:
        if not isinstance(self._ml_flow, _Module):
            return None
        if self._resumed is None:
            return {}
        client, run = self._ml_flow.MlflowClient(), self._resumed
        names = client.get_run(run).data.metrics
        return {name: {point.step for point in client.get_metric_history(run, name)} for name in names}

    def _called(self, name: str) -> str:
        # As MLflowCallback.on_log does.
        return re.sub(r"[^0-9A-Za-z_\-\.\ :/]", "_", name)


_MIXINS: dict[str, type[_Continued]] = {
    "TensorBoardCallback": _TensorBoard,
    "WandbCallback": _Wandb,
    "TrackioCallback": _Trackio,
    "MLflowCallback": _MLflow,
}


class _Module:
    """A tracker's module with some of its functions replaced, for one callback."""

    def __init__(self, module: Any, **replaced: Callable[..., Any]) -> None:
        self.module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _own(module: Any) -> Any:
    return module.module if isinstance(module, _Module) else module
