"""What Lightning's trainer knows besides model, optimizers and schedulers, as one object with a state."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric

from checkpointing.process.reachable import is_own_module, settings_of

# What a logged value is besides numbers.
_LOGGED_AS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


class LightningLoopState:
    """Progress of the loops, values logged so far, metrics, callbacks and the data module.

    It belongs to the moment between two batches: after all that follows a step, before the next one begins.

    Attributes:
        step: Batches after which an optimizer has stepped.
        ended: Training has reached its end.
    """

    def __init__(self, trainer: Any, owner: Callback) -> None:
        """Follow a Lightning trainer, for the callback `owner`, which has no state of its own."""
        self._trainer, self._owner = trainer, owner
        self.step, self.ended = 0, False
        self._logging: list[Any] = []
        self._called_back: set[str] = set()
        self._accumulation: int = trainer.accumulate_grad_batches
        self._is_loaded = False

    def go_on(self) -> None:
        """Note that a step follows, also where an earlier process had reached the end."""
        if self.ended:
            self.ended = False
            self._forget_restart()

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        trainer = self._trainer
        connector, module, data = trainer._logger_connector, trainer.lightning_module, trainer.datamodule
        return {
            "step": self.step,
            "ended": self.ended,
            "stopped": bool(trainer.should_stop),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "loops": _between_batches(trainer.fit_loop.state_dict()),
            "logged": logged_values(trainer.fit_loop.epoch_loop._results),
            "callback_metrics": dict(trainer.callback_metrics),
            "logged_metrics": dict(connector._logged_metrics),
            # Whether the next value that is logged starts from zero, as in an epoch's first batch.
            "logging": [connector._first_loop_iter, connector._current_fx],
            "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
            "callbacks": {
                callback.state_key: state
                for callback in trainer.callbacks
                if callback is not self._owner and (state := callback.state_dict())
            },
            "data": data.state_dict() if data is not None else {},
            "added": self._added_by_hooks(),
        }

    def _added_by_hooks(self) -> dict[str, Any]:
        """Return what `on_save_checkpoint` adds to a checkpoint of Lightning's, or replaces in it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = self._checkpoint()
        before = dict(checkpoint)
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in before or value is not before[name]}

    def _checkpoint(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        wanted = type(module).on_save_checkpoint is not CheckpointHooks.on_save_checkpoint or any(
            type(callback).on_save_checkpoint is not Callback.on_save_checkpoint for callback in trainer.callbacks
        )
        state = module.state_dict() if wanted else {}
        return {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "state_dict": state, "loops": {}}

    # -- restoring -------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all of it, before the loops begin; once, although it is loaded again with the optimizer."""
        if self._is_loaded:
            return
        self._is_loaded = True
        trainer = self._trainer
        module, device = trainer.lightning_module, trainer.strategy.root_device
        self.step, self.ended = state["step"], state["ended"]
        trainer.should_stop = state["stopped"]
        self._accumulation = state["accumulate_grad_batches"]
        if not any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
            trainer.accumulate_grad_batches = self._accumulation
        trainer.fit_loop.load_state_dict(dict(state["loops"]))
        for name, metric in _metrics(module):
            if name in state["metrics"]:
                _restore_metric(metric, state["metrics"][name], device)
        restore_logged_values(trainer, state["logged"])
        connector = trainer._logger_connector
        connector._callback_metrics.update(_on(device, state["callback_metrics"]))
        connector._logged_metrics.update(_on(device, state["logged_metrics"]))
        checkpoint = {**self._checkpoint(), **state["added"], "callbacks": state["callbacks"]}
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, module, checkpoint)
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        module.on_load_checkpoint(checkpoint)
        if trainer.datamodule is not None and state["data"]:
            trainer.datamodule.load_state_dict(state["data"])
        self._logging = state["logging"]
        self._called_back = set(state["callback_metrics"])
        self._continue_loops()

    def continue_logging(self) -> None:
        """Have values added to those logged before; called once the first batch of a resumed run is drawn."""
        # A `GradientAccumulationScheduler` sets it at an epoch's begin, and refuses to find it set before.
        self._trainer.accumulate_grad_batches = self._accumulation
        connector = self._trainer._logger_connector
        connector._first_loop_iter, connector._current_fx = self._logging
        # Who has read the metrics before the first batch took the restored sums for those of an epoch that is over.
        for name in connector._callback_metrics.keys() - self._called_back:
            del connector._callback_metrics[name]

    def _continue_loops(self) -> None:
        """Have the loops continue between two batches, where Lightning would expect to have saved after one.

        Its own restart skips a validation that is due, updates no scheduler that goes by a metric, and counts the step
        before once more.
        """
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self.ended:
            # There may be nothing left to do. Then no sanity check is to replace the metrics; see `go_on`.
            return

        def reset() -> None:
            # Called where the resumed epoch begins: all counters are as they were.
            vars(epoch_loop).pop("reset", None)
            self._forget_restart()

        epoch_loop.reset = reset

    def _forget_restart(self) -> None:
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        inner = (epoch_loop.automatic_optimization, epoch_loop.manual_optimization, epoch_loop.val_loop)
        for loop in (fit_loop, epoch_loop, *inner):
            # The property would decide otherwise where steps are limited.
            loop._restarting = False


def _between_batches(state: dict[str, Any]) -> dict[str, Any]:
    """Return the loops' state without the batch that has been drawn already."""
    found = {name: value for name, value in state.items() if name != "state_dict"}
    progress = dict(found["epoch_loop.batch_progress"])
    for part in ("total", "current"):
        completed = progress[part]["completed"]
        progress[part] = dict.fromkeys(progress[part], completed)
    progress["is_last_batch"] = False
    return {**found, "epoch_loop.batch_progress": progress}


def _metrics(module: Any) -> list[tuple[str, Metric]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _metric_state(metric: Metric) -> dict[str, Any]:
    values = {name: getattr(metric, name) for name in metric._defaults}
    copied = {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
    return {"values": copied, "updates": metric._update_count}


def _restore_metric(metric: Metric, state: Mapping[str, Any], device: torch.device) -> None:
    for name, value in state["values"].items():
        on_device = [one.to(device) for one in value] if isinstance(value, list) else value.to(device)
        setattr(metric, name, on_device)
    metric._update_count, metric._computed = state["updates"], None


def _on(device: torch.device, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def logged_values(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what `self.log` has added up since the epoch began, of Lightning's collection of one loop."""
    return {key: _logged_value(metric) for key, metric in results.items() if metric.meta.sync.group is None}


def restore_logged_values(trainer: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Put what `logged_values` returned back into the training loop's collection."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    for key, saved in state.items():
        metric = _ResultMetric(_metadata(saved, trainer.strategy.reduce), is_tensor=saved["value"] is not None)
        if saved["value"] is not None:
            metric.value = saved["value"].to(device)
            if saved["weight"] is not None:
                metric.cumulated_batch_size = saved["weight"].to(device)
        else:
            # A torchmetrics metric of the module, whose own state has been restored.
            metric.value = trainer.lightning_module.get_submodule(saved["metric_attribute"])
        metric.has_reset = saved["has_reset"]
        metric._update_count = 1
        results[key] = metric


def _logged_value(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    reduction = meta.reduce_fx.__name__
    return {
        **{name: getattr(meta, name) for name in _LOGGED_AS},
        "reduction": reduction,
        "of_torch": getattr(torch, reduction, None) is meta.reduce_fx,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "value": metric.value if metric.is_tensor else None,
        "weight": getattr(metric, "cumulated_batch_size", None),
        "has_reset": metric.has_reset,
    }


def _metadata(saved: Mapping[str, Any], reduce: Any) -> _Metadata:
    reduction = getattr(torch if saved["of_torch"] else builtins, saved["reduction"])
    meta = _Metadata(**{name: saved[name] for name in _LOGGED_AS}, reduce_fx=reduction)
    meta.sync = _Sync(_should=saved["sync"], fn=reduce, rank_zero_only=saved["rank_zero_only"])
    return meta


# -- what no checkpoint holds ----------------------------------------------------------------------------------------

# What Lightning itself changes in its `Trainer`; it is restored.
_CHANGED_SETTINGS = ("should_stop", "accumulate_grad_batches")


def watched_in(trainer: Any, owner: object) -> dict[str, object]:
    """Return the objects of a trainer in which what no checkpoint holds is looked for, by name.

    Args:
        trainer: The trainer.
        owner: The callback that saves.
    """
    found: dict[str, object] = {"trainer": settings_of(trainer, _CHANGED_SETTINGS)}
    hyperparameters = getattr(trainer.lightning_module, "_hparams", None)
    if isinstance(hyperparameters, dict):
        found["hparams"] = SimpleNamespace(**hyperparameters)
    for callback in trainer.callbacks:
        if callback is not owner:
            found.setdefault(type(callback).__name__, callback)
    return found if trainer.datamodule is None else {**found, "datamodule": trainer.datamodule}


def saved_in(trainer: Any, owner: object) -> list[object]:
    """Return the objects of a trainer that are saved, or belong to its loops, of which what matters is saved."""
    metrics = [metric for _, metric in _metrics(trainer.lightning_module)]
    callbacks = [one for one in trainer.callbacks if not is_own_module(type(one).__module__)]
    return [trainer, owner, trainer.fit_loop, trainer.strategy, trainer.profiler, *callbacks, *metrics]


def exported_in(trainer: Any, owner: object) -> list[tuple[object, Any]]:
    """Return the callbacks and the data module of the script's classes that are saved, each with what is saved."""
    own = [one for one in (*trainer.callbacks, trainer.datamodule) if one is not owner]
    return [(one, one.state_dict()) for one in own if one is not None and is_own_module(type(one).__module__)]
