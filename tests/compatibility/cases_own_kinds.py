"""What scripts keep where nobody looks: in modules, closures and submodules, in wrappers and in counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from compatibility import tiny
from compatibility.cases_optimizers import batch, wrapped
from compatibility.cases_trainer import trainer
from compatibility.ranks import Run
from compatibility.table import case, differs
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import DataCollatorForLanguageModeling, Trainer

rng = np.random.default_rng(5)


def _with_loader(run: Run, loader: Any, *, ahead: int = 0, model: Any = None) -> None:
    model = model if model is not None else tiny.Perceptron()
    net = wrapped(run, model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = run.manager(model=net, optimizer=optimizer)

    def batches() -> Iterator[Any]:
        drawn = manager.batches(loader, ahead=ahead)
        waiting = deque(next(drawn) for _ in range(ahead))
        while True:
            waiting.append(next(drawn))
            yield waiting.popleft()

    for step, data in run.steps(manager, batches):
        optimizer.zero_grad()
        net(data["x"], data["labels"])["loss"].backward()
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


class _ByModule(tiny.Points):
    """Draws from a generator of its module."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = super().__getitem__(index)
        return {**point, "x": point["x"] + float(rng.normal())}


@case("own kinds/generator at module level", ranks=1, twice=True)
def _module_level(run: Run) -> None:
    _with_loader(run, DataLoader(_ByModule(), batch_size=3, shuffle=True))


@case("own kinds/generator at module level, workers", ranks=1, twice=True)
def _module_level_workers(run: Run) -> None:
    _with_loader(run, DataLoader(_ByModule(), batch_size=3, shuffle=True, num_workers=2))


class _Jitter:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.rng.normal())


class _Composed:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x


class _Transformed(tiny.Points):
    def __init__(self) -> None:
        super().__init__()
        self.transform = _Composed([_Jitter()])

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = super().__getitem__(index)
        return {**point, "x": self.transform(point["x"])}


@case("own kinds/composition inside a Subset", ranks=1, twice=True)
def _composed(run: Run) -> None:
    _with_loader(run, DataLoader(Subset(_Transformed(), range(tiny.NUM_ROWS - 2)), batch_size=3, shuffle=True))


class _Noisy(tiny.Perceptron):
    """Its noise is drawn from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.source), *args, **kwargs)


@case("own kinds/generator of the model", ranks=1, twice=True)
def _of_the_model(run: Run) -> None:
    model = _Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = run.manager(model=model, optimizer=optimizer)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        optimizer.zero_grad()
        model(x, y)["loss"].backward()
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


@case("own kinds/prefetcher around manager.batches, ahead=1", ranks=1)
def _prefetcher(run: Run) -> None:
    _with_loader(run, DataLoader(tiny.Points(), batch_size=3, shuffle=True), ahead=1)


@case("own kinds/masks by a collator with a seed", twice=True)
def _mask_seed(run: Run) -> None:
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=True, mlm_probability=0.3, seed=42)
    dataset = tiny.Rows()
    dataset.rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in dataset.rows]
    run.train(trainer(run, model=tiny.bert(), data_collator=collator, dataset=dataset))


class _WarmUp(Trainer):
    """Weighs the first losses less, by a counter that nothing saves."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.calls += 1
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return result if return_outputs else result * min(1.0, self.calls / 30)


@case(
    "own kinds/counter of a Trainer's subclass",
    verdict=differs(
        "an attribute of the script's own trainer is in no checkpoint; the first save and the step record name it",
        part="^after the kill: ",
        warning=r"training has changed what no checkpoint holds: _WarmUp.calls\.",
    ),
)
def _counter(run: Run) -> None:
    run.train(trainer(run, cls=_WarmUp))


class _Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.weight.exp() + self.weight.square()


@case("own kinds/loss with a parameter that the optimizer trains", ranks=1)
def _weighted(run: Run) -> None:
    model, weigh = tiny.Perceptron(), _Weighted()
    optimizer = torch.optim.AdamW([*model.parameters(), *weigh.parameters()], lr=1e-2)
    manager = run.manager(model=model, optimizer=optimizer)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        optimizer.zero_grad()
        weigh(model(x, y)["loss"]).backward()
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=[model, weigh], optimizer=optimizer)


@case("own kinds/average that accelerate has registered", ranks=1)
def _registered(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny.Perceptron()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    net, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(average)
    manager = run.manager(model=net, optimizer=optimizer)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        optimizer.zero_grad()
        accelerator.backward(net(x, y)["loss"])
        optimizer.step()
        average.update_parameters(model)
        manager.step(step + 1)
    manager.close()
    run.finish(model=[model, average], optimizer=optimizer)
