"""Optimizers and schedules: in a bare loop under DDP, and those that the Trainer knows by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from compatibility import tiny
from compatibility.cases_trainer import trainer
from compatibility.ranks import Run
from compatibility.table import IDENTICAL, case, refused
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler


def batch(run: Run, step: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + run.rank)
    return torch.randn(size, 12, generator=generator), torch.randn(size, generator=generator)


def wrapped(run: Run, model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if run.world_size > 1 else model


def train(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    closure: bool = False,
    metric: bool = False,
    switch: bool = False,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """A loop as in the README.

    Args:
        closure: the optimizer computes the loss itself, as LBFGS wants it.
        metric: the scheduler is given the loss.
        switch: the optimizer has a mode for training.
        options: the manager's.
    """
    net = wrapped(run, model, **(ddp or {}))
    net.train()
    if switch:
        optimizer.train()
    manager = run.manager(model=net, optimizer=optimizer, scheduler=scheduler, **options)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)

        def loss_of(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(x, y)["loss"]
            loss.backward()
            return loss

        if closure:
            loss = optimizer.step(loss_of)
        else:
            loss = loss_of()
            optimizer.step()
        if scheduler is not None:
            scheduler.step(*([run.mean(float(loss))] if metric else []))
        run.saw(step, "loss", float(loss))
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer, scheduler=scheduler)


def _optimizer(
    name: str,
    make: Callable[[nn.Module], Any],
    *,
    needs: tuple[str, ...] = (),
    verdict: Any = IDENTICAL,
    timeout_s: float = 90.0,
    model: Callable[[], nn.Module] = tiny.Perceptron,
    **options: Any,
) -> None:
    @case(f"optimizers/{name}", needs=needs, verdict=verdict, timeout_s=timeout_s)
    def _body(run: Run) -> None:
        run.initialize()
        net = model()
        train(run, net, make(net), **options)


def _torch(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: getattr(torch.optim, name)(model.parameters(), **{"lr": 1e-2, **options})


def _extra(module: str, name: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: getattr(importlib.import_module(module), name)(model.parameters(), **options)


_optimizer("AdamW", _torch("AdamW"))
_optimizer("AdamW fused", _torch("AdamW", fused=True))
_optimizer("AdamW foreach", _torch("AdamW", foreach=True))
_optimizer("AdamW amsgrad", _torch("AdamW", amsgrad=True))
_optimizer("AdamW capturable rate in a tensor", _torch("AdamW", lr=torch.tensor(1e-2)))
_optimizer("SGD", _torch("SGD"))
_optimizer("SGD momentum", _torch("SGD", momentum=0.9, nesterov=True))
for _name in ("Adafactor", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
    _optimizer(_name, _torch(_name))
_optimizer("RMSprop centered", _torch("RMSprop", centered=True, momentum=0.9))
_optimizer("LBFGS", _torch("LBFGS", lr=0.1, max_iter=3, history_size=4), closure=True)
_optimizer("Lion", _extra("lion_pytorch", "Lion", lr=1e-3), needs=("lion_pytorch",))
_optimizer("Prodigy", _extra("prodigyopt", "Prodigy", lr=1.0), needs=("prodigyopt",))
_optimizer(
    "schedule-free AdamW",
    _extra("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=3),
    needs=("schedulefree",),
    switch=True,
)
_optimizer(
    "schedule-free SGD", _extra("schedulefree", "SGDScheduleFree", lr=1e-2), needs=("schedulefree",), switch=True
)
_optimizer(
    "bitsandbytes Adam8bit",
    _extra("bitsandbytes.optim", "Adam8bit", lr=1e-2, min_8bit_size=1),
    needs=("bitsandbytes",),
)
_optimizer("bitsandbytes Lion8bit", _extra("bitsandbytes.optim", "Lion8bit", min_8bit_size=1), needs=("bitsandbytes",))
_optimizer("bitsandbytes AdamW, 32 bit", _extra("bitsandbytes.optim", "AdamW", lr=1e-2), needs=("bitsandbytes",))


class _Wide(tiny.Perceptron):
    """With a matrix that torchao quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 512)
        self.last = nn.Linear(512, 1)
        self.middle = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        out = self.last(self.dropout(self.middle(torch.relu(self.first(x))))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def compile_quickly() -> None:
    """Leave out the C++ compiler, which takes half a minute for each rank."""
    setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # noqa: B010


_TORCHAO = refused(r"torchao's AdamW\w+ is not supported")


def _torchao(name: str) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        compile_quickly()
        return _extra("torchao.optim", name, lr=1e-3)(model)

    return make


for _name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
    _optimizer(f"torchao {_name}", _torchao(_name), needs=("torchao",), model=_Wide, verdict=_TORCHAO)


@case("optimizers/Muon")
def _muon(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    matrices = [value for value in model.parameters() if value.ndim == 2]
    for value in model.parameters():
        value.requires_grad_(value.ndim == 2)
    train(run, model, torch.optim.Muon(matrices, lr=1e-2))


class _Both:
    """Muon for matrices and AdamW for the rest, as one optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._optimizers = {
            "muon": torch.optim.Muon([value for value in model.parameters() if value.ndim == 2], lr=1e-2),
            "adamw": torch.optim.AdamW([value for value in model.parameters() if value.ndim != 2], lr=1e-2),
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers.values() for group in one.param_groups]

    def zero_grad(self) -> None:
        for one in self._optimizers.values():
            one.zero_grad()

    def step(self) -> None:
        for one in self._optimizers.values():
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self._optimizers.items():
            one.load_state_dict(state[name])


@case("optimizers/Muon and AdamW in a class of one's own")
def _both(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    train(run, model, _Both(model))


class _NoGroups:
    """The least that an optimizer can be."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._velocity = [torch.zeros_like(value) for value in self._parameters]

    def zero_grad(self) -> None:
        for value in self._parameters:
            value.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for value, velocity in zip(self._parameters, self._velocity, strict=True):
            if value.grad is not None:
                velocity.mul_(0.9).add_(value.grad)
                value.sub_(velocity, alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for velocity, saved in zip(self._velocity, state["velocity"], strict=True):
            velocity.copy_(saved)


@case("optimizers/own, without param_groups")
def _no_groups(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    train(run, model, _NoGroups(model))


def _groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    matrices = [value for value in model.parameters() if value.ndim == 2]
    vectors = [value for value in model.parameters() if value.ndim != 2]
    return [{"params": matrices, **options}, {"params": vectors, "weight_decay": 0.0, "name": "vectors"}]


_optimizer("groups", lambda model: torch.optim.AdamW(_groups(model, weight_decay=0.1), lr=1e-2))
_optimizer("numpy rate", lambda model: torch.optim.AdamW(_groups(model, lr=np.float64(1e-2)), lr=np.float64(1e-3)))
_optimizer("float32 numpy rate", _torch("SGD", lr=np.float32(1e-2)))
_optimizer("numpy scalar in a group", lambda model: torch.optim.AdamW(_groups(model, depth=np.int64(3)), lr=1e-2))
_optimizer("text and tuple in a group", lambda model: torch.optim.AdamW(_groups(model, tags=("a", "b")), lr=1e-2))
_optimizer("maximize and decay", _torch("Adam", maximize=True, weight_decay=0.1))


class _Depth:
    """Of a module of the user's, as a value in a group."""


_optimizer(
    "object in a group",
    lambda model: torch.optim.AdamW(_groups(model, depth=_Depth()), lr=1e-2),
    verdict=refused(r"param_groups\[0\]\['depth'\].*_Depth"),
)


@case("optimizers/group added on the way")
def _added(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.first.parameters(), lr=1e-2)
    # As the user must: a restarted script builds the optimizer as it was when it was saved.
    optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 1e-3})
    train(run, model, optimizer)


# -- schedules --------------------------------------------------------------------------------------------------------


def _schedule(name: str, make: Callable[[Any], Any], *, verdict: Any = IDENTICAL, **options: Any) -> None:
    @case(f"schedules/{name}", verdict=verdict)
    def _body(run: Run) -> None:
        run.initialize()
        model = tiny.Perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(run, model, optimizer, make(optimizer), **options)


_schedule("StepLR", lambda optimizer: lr_scheduler.StepLR(optimizer, 3))
_schedule("CosineAnnealingWarmRestarts", lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3))
_schedule("OneCycleLR", lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12))
_schedule("CyclicLR", lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3))
_schedule("MultiStepLR", lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 8]))
_schedule("LambdaLR", lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))
_schedule("ReduceLROnPlateau", lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), metric=True)
_schedule(
    "SequentialLR",
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 7)],
        milestones=[3],
    ),
)
_schedule(
    "ChainedScheduler",
    lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
)


class _NumpyWarmup:
    """Computes with numpy, so that the optimizer's rates and its own state become numpy scalars."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._rates = np.linspace(0.01, 0.1, 12)
        self._step = np.int64(0)

    def step(self) -> None:
        self._step += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[self._step]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = np.int64(state["step"])


_schedule("own, with numpy scalars", _NumpyWarmup)


# -- by name in the Trainer -------------------------------------------------------------------------------------------


def _named(name: str, needs: tuple[str, ...], *, verdict: Any = IDENTICAL, **options: Any) -> None:
    @case(f"trainer/optim {name}", stock=True, needs=needs, verdict=verdict)
    def _body(run: Run) -> None:
        compile_quickly()
        run.train(trainer(run, optim=name, **options))


_named("adamw_bnb_8bit", ("bitsandbytes",))
_named("lion_32bit", ("bitsandbytes",))
_named("ademamix", ("bitsandbytes",))
_named("schedule_free_adamw", ("schedulefree",), lr_scheduler_type="constant")
_named("adamw_torch_8bit", ("torchao",))
