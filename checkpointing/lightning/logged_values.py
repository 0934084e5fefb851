"""Values that `self.log` has added up since the epoch began, which Lightning's own checkpoints do not hold."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

_PLAIN = (
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


def logged_values(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return plain values and tensors.

    Args:
        results: Lightning's collection of one loop.
    """
    return {key: _state(metric) for key, metric in results.items() if metric.meta.sync.group is None}


def restore_logged_values(trainer: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Put them back into the training loop's collection.

    Args:
        trainer: Lightning's trainer.
        state: What `logged_values` returned.
    """
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    for key, saved in state.items():
        metric = _ResultMetric(_meta(saved, trainer.strategy.reduce), is_tensor=saved["value"] is not None)
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


def _state(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    reduction = meta.reduce_fx.__name__
    return {
        **{name: getattr(meta, name) for name in _PLAIN},
        "reduction": reduction,
        "of_torch": getattr(torch, reduction, None) is meta.reduce_fx,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "value": metric.value if metric.is_tensor else None,
        "weight": getattr(metric, "cumulated_batch_size", None),
        "has_reset": metric.has_reset,
    }


def _meta(saved: Mapping[str, Any], reduce: Any) -> _Metadata:
    reduction = getattr(torch if saved["of_torch"] else builtins, saved["reduction"])
    meta = _Metadata(**{name: saved[name] for name in _PLAIN}, reduce_fx=reduction)
    meta.sync = _Sync(_should=saved["sync"], fn=reduce, rank_zero_only=saved["rank_zero_only"])
    return meta
