"""Values that `self.log` has added up, in and out of Lightning's own collection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from checkpointing.lightning.logged_values import logged_values, restore_logged_values


def reduce(value: Any, *_: Any, **__: Any) -> Any:
    return value


def log(results: Any, name: str, value: Any, **options: Any) -> None:
    chosen = {"on_step": True, "on_epoch": True, "batch_size": 4, "sync_dist_fn": reduce, **options}
    results.log("training_step", name, value, **chosen)


def restored(state: Any, module: Any = None) -> Any:
    results = _ResultCollection(training=True)
    strategy = SimpleNamespace(reduce=reduce, root_device=torch.device("cpu"))
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_results=results))
    restore_logged_values(SimpleNamespace(fit_loop=fit_loop, strategy=strategy, lightning_module=module), state)
    return results


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min", max])
def test_an_epoch_goes_on_with_the_same_bits(reduction: Any) -> None:
    values = torch.rand(6, generator=torch.Generator().manual_seed(0))
    through = _ResultCollection(training=True)
    for value in values:
        log(through, "loss", value, reduce_fx=reduction)
    half = _ResultCollection(training=True)
    for value in values[:3]:
        log(half, "loss", value, reduce_fx=reduction)
    results = restored(logged_values(half))
    for value in values[3:]:
        log(results, "loss", value, reduce_fx=reduction)
    assert results.metrics(on_step=False)["callback"] == through.metrics(on_step=False)["callback"]


def test_a_metric_of_the_module_is_found_again() -> None:
    module = torch.nn.Module()
    module.error = torchmetrics.MeanAbsoluteError()
    results = _ResultCollection(training=True)
    module.error.update(torch.tensor([3.0]), torch.tensor([1.0]))
    log(results, "error", module.error, on_step=False, metric_attribute="error")
    again = restored(logged_values(results), module)
    assert again["training_step.error"].value is module.error
    assert again.metrics(on_step=False)["callback"] == {"error": torch.tensor(2.0)}


def test_what_was_reset_is_not_shown() -> None:
    results = _ResultCollection(training=True)
    log(results, "loss", torch.tensor(1.0))
    results.reset()
    assert restored(logged_values(results)).metrics(on_step=False)["callback"] == {}
