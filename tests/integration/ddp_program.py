"""Trains small models under DDP in many variants; prints for each whether a resumed training ends in the same bits.

Each training is interrupted after one, two and three steps: `run` makes model, wrapper, optimizer and manager again, as
a new process would.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Ddp

from checkpointing import CheckpointManager

STEPS = 6
Wrap = Callable[[nn.Module], nn.Module]


class HookState:
    """PowerSGD's memory, as an object in `states`."""

    _NAMES = ("error_dict", "p_memory_dict", "q_memory_dict", "iter")

    def __init__(self) -> None:
        self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    def state_dict(self) -> dict[str, Any]:
        kept: Any = self.state.rng.get_state()
        words, at = kept[1:3]
        own = {name: getattr(self.state, name) for name in self._NAMES}
        return {**own, "words": torch.from_numpy(words.astype("int64")), "at": at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._NAMES:
            setattr(self.state, name, state[name])
        self.state.rng.set_state(("MT19937", state["words"].numpy().astype("uint32"), state["at"], 0, 0.0))


def net() -> nn.Module:
    torch.manual_seed(0)
    block = [layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU())]
    return nn.Sequential(*block, nn.Linear(96, 8))


class Training:
    """One training; the variants override parts of it."""

    accumulation = 1
    synchronised_every_time = False
    evaluates = False
    restores_before_wrapping = False

    def make(self) -> None:
        self.model: nn.Module = net()

    def wrap(self) -> None:
        self.trained: Any = Ddp(self.model, bucket_cap_mb=0.1)

    def saved(self) -> nn.Module:
        return self.model if self.restores_before_wrapping else self.trained

    def states(self) -> dict[str, Any]:
        return {}

    def loss(self, step: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank())
        x, y = torch.randn(8, 96, generator=generator), torch.randn(8, 8, generator=generator)
        found: torch.Tensor = (self.trained(x) - y).square().mean()
        return found

    def step(self, step: int) -> None:
        for micro in range(self.accumulation):
            last = micro == self.accumulation - 1 or self.synchronised_every_time
            with contextlib.nullcontext() if last else self.trained.no_sync():
                torch.autograd.backward(self.loss(step, micro))
        if self.evaluates:
            with torch.no_grad():
                self.loss(step, 99)

    def run(self, folder: Path, until: int) -> str:
        self.make()
        if not self.restores_before_wrapping:
            self.wrap()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        manager = CheckpointManager(
            folder,
            model=self.saved(),
            optimizer=optimizer,
            snapshot_steps=None,
            save_steps=1,
            states=self.states(),
        )
        start = manager.resume()
        if self.restores_before_wrapping:
            self.wrap()
        for step in range(start, until):
            self.step(step)
            optimizer.step()
            optimizer.zero_grad()
            manager.step(step + 1)
        manager.close()
        return digest(self.model)


def digest(model: nn.Module) -> str:
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()


class Plain(Training):
    """Nothing special."""


class LargeBuckets(Training):
    def wrap(self) -> None:
        self.trained = Ddp(self.model)


class Unused(Training):
    def wrap(self) -> None:
        self.trained = Ddp(self.model, find_unused_parameters=True, bucket_cap_mb=0.1)


class Static(Training):
    def wrap(self) -> None:
        self.trained = Ddp(self.model, static_graph=True, bucket_cap_mb=0.1)


class Views(Training):
    def wrap(self) -> None:
        self.trained = Ddp(self.model, gradient_as_bucket_view=True, bucket_cap_mb=0.1)


class NoSync(Training):
    accumulation = 3


class Accumulated(Training):
    accumulation, synchronised_every_time = 2, True


class Evaluated(Training):
    evaluates = True


class Late(Training):
    restores_before_wrapping = True


class Frozen(Training):
    def make(self) -> None:
        super().make()
        for parameter in list(self.model.parameters())[:5]:
            parameter.requires_grad_(False)


class OtherOrder(Training):
    """Layers run in another order than they are registered."""

    def make(self) -> None:
        class Model(nn.Module):
            def __init__(self, layers: nn.Sequential) -> None:
                super().__init__()
                self.head = layers[-1]
                self.rest = nn.ModuleList(reversed(list(layers)[:-1]))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in reversed(self.rest):
                    x = layer(x)
                return self.head(x)  # type: ignore[no-any-return]

        self.model = Model(net())  # type: ignore[arg-type]


class StaticOtherOrder(OtherOrder, Static):
    pass


class Mixed(Training):
    """Parameters of two types, each with buckets of its own."""

    def make(self) -> None:
        super().make()
        self.model[3].double()  # type: ignore[index]
        self.model[4].double()  # type: ignore[index]
        self.model[3].register_forward_pre_hook(lambda _, args: (args[0].double(),))  # type: ignore[index]
        self.model[4].register_forward_hook(lambda _, args, output: output.float())  # type: ignore[index]


class HalfHook(Training):
    def wrap(self) -> None:
        self.trained = Ddp(self.model, bucket_cap_mb=0.1)
        self.trained.register_comm_hook(None, default_hooks.fp16_compress_hook)


class PowerSgd(Training):
    """In one bucket: with gloo, PowerSGD's callbacks for several wait for each other."""

    def make(self) -> None:
        super().make()
        self.hook = HookState()

    def wrap(self) -> None:
        self.trained = Ddp(self.model)
        self.trained.register_comm_hook(self.hook.state, powerSGD_hook.powerSGD_hook)

    def states(self) -> dict[str, Any]:
        return {"hook": self.hook}


class Compiled(Training):
    def wrap(self) -> None:
        self.trained = torch.compile(Ddp(self.model), backend="eager")


class TwoModules(Training):
    """The second one is trained from the third step on; the model that is saved holds both wrappers."""

    def make(self) -> None:
        self.pair = self.model = nn.ModuleDict({"one": net(), "two": net()})

    def wrap(self) -> None:
        for name, module in list(self.pair.items()):
            self.pair[name] = Ddp(module, bucket_cap_mb=0.1)
        self.trained = self.pair["one"]

    def saved(self) -> nn.Module:
        return self.pair

    def step(self, step: int) -> None:
        super().step(step)
        if step >= 2:
            self.trained = self.pair["two"]
            super().step(step)
            self.trained = self.pair["one"]


class ByUnwrapped(Training):
    """The manager is given the model without its wrapper."""

    def wrap(self) -> None:
        self.trained = Ddp(self.model, bucket_cap_mb=0.1)

    def saved(self) -> nn.Module:
        return self.model


VARIANTS: dict[str, type[Training]] = {
    kind.__name__: kind
    for kind in (
        *(Plain, LargeBuckets, Unused, Static, Views, NoSync, Accumulated, Evaluated, Late, Frozen, OtherOrder),
        *(StaticOtherOrder, Mixed, HalfHook, PowerSgd, Compiled, TwoModules, ByUnwrapped),
    )
}


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or VARIANTS:
        kind = VARIANTS[name]
        found = {"undisturbed": kind().run(folder / name / "a", STEPS)}
        for first in (1, 2, 3):
            for until in (first, STEPS):
                found[f"interrupted after {first}"] = kind().run(folder / name / str(first), until)
        if dist.get_rank() == 0:
            print(json.dumps({"variant": name, "equal": len(set(found.values())) == 1, "digests": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
