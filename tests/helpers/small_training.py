"""A small training with a SnapshotSchedule and no agent, for tests that change its state at awkward moments."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from checkpointing.agent.events import Event
from checkpointing.agent.protocol import Refusal
from checkpointing.commit.retention import Retention
from checkpointing.format.layout import MODEL_NAME, OPTIMIZER_NAME
from checkpointing.process import device as devices
from checkpointing.process.device import Device
from checkpointing.process.pinning import Pinning
from checkpointing.process.ranks import Ranks
from checkpointing.process.trees import tensors_in
from checkpointing.snapshot.request import SnapshotRequest
from checkpointing.snapshot.schedule import SnapshotSchedule
from checkpointing.state.train_state import TrainState

Tensors = list[torch.Tensor]


class Arenas:
    """In place of the agent: one arena; what is staged is read back at once.

    Args:
        is_pinned: Into memory that is not pinned, CUDA copies before it returns, and no copy is late.
    """

    def __init__(self, *, is_pinned: bool = False) -> None:
        memory: Any = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=is_pinned).numpy()
        self.memory = memoryview(memory)
        self.staged_steps: dict[int, dict[str, Any]] = {}
        self.abandoned: list[str] = []
        self.not_finite: list[str] = []
        self.announced: list[Event] = []
        self.may_reserve = threading.Event()

    def reserve(self, nbytes: int, guests: int = 0) -> bool:
        return self.may_reserve.wait()

    def acquire(
        self, step: int, nbytes: int, *, wait: bool, is_urgent: bool = False
    ) -> tuple[int, memoryview] | Refusal:
        assert nbytes <= len(self.memory)
        self.memory[:] = b"\xaa" * len(self.memory)
        return 0, self.memory

    def staged(self, step: int, arena: int, files: list[tuple[str, int, int]], *args: Any, **kwargs: Any) -> None:
        self.not_finite += kwargs.get("not_finite", ())
        self.staged_steps[step] = {name: bytes(self.memory[offset : offset + n]) for name, offset, n in files}

    def abandon(self, step: int, arena: int, reason: str) -> None:
        self.abandoned.append(reason)

    def announce(self, event: Event) -> None:
        self.announced.append(event)


class Average:
    """Changes whenever the script likes, as an EMA does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self) -> None:
        for tensor in self.tensors:
            tensor.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": list(self.tensors)}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


class Foreign:
    """An optimizer that is not torch's: nobody hears when it steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self.moments = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, moment in zip(self._parameters, self.moments, strict=True):
            moment.add_(1)
            parameter.add_(moment)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": list(self.moments)}

    def load_state_dict(self, state: Any) -> None:
        for moment, saved in zip(self.moments, state["moments"], strict=True):
            moment.copy_(saved)


class SmallTraining:
    """Its methods are what a script may do."""

    def __init__(
        self,
        *,
        overlap: bool | None,
        foreign: bool = False,
        on: str = "cpu",
        device: Device | None = None,
        capturable: bool = False,
        pinning: Pinning | None = None,
        scaler: Any = None,
        ranks: Ranks | None = None,
        before: Callable[[torch.nn.Module], None] = lambda model: None,
    ) -> None:
        """
        Args:
            on: where the tensors are.
            device: stands for it.
            capturable: the optimizer's step can be a part of a CUDA graph.
            scaler: the gradient scaler.
            ranks: this rank, where there are several.
            before: called with the model before it is known to anything.
        """
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(on)
        before(self.model)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.1, capturable=capturable)
        self.optimizer: Any = Foreign(self.model) if foreign else adamw
        self.average, self.arenas, self._on = Average(self.model), Arenas(is_pinned=on.startswith("cuda")), on
        self.train_state = TrainState(self.model, self.optimizer, scaler=scaler, states={"average": self.average})
        client: Any = self.arenas
        tiers: Any = None
        self.snapshotter = SnapshotSchedule(
            client,
            tiers,
            ranks or Ranks(),
            overlap=overlap,
            check_replicas=True,
            device_of=devices.of if device is None else lambda _: device,
            pinning=pinning,
        )
        self.step_number = 0
        self.expected: dict[int, Tensors] = {}
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer_step()

    def state(self) -> Tensors:
        """All that a snapshot holds, in the order of its files."""
        states = [part.state_dict() for part in (self.model, self.optimizer, self.average)]
        return [tensor.detach().cpu().clone() for tensor in tensors_in(states)]

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self._end_step()

    def replayed_step(self) -> None:
        """A CUDA graph with the whole step in it: no hook, no versions."""
        devices.announce_replay()
        self._change_unseen()
        self._end_step()

    def skipped_step(self) -> None:
        """A gradient scaler has found an overflow."""
        self._end_step()

    def update_average(self) -> None:
        self.average.update()

    @torch.no_grad()
    def forward_in_training(self) -> None:
        """The running mean and variance move on."""
        self.model(torch.randn(5, 3).to(self._on))

    @torch.no_grad()
    def write_directly(self) -> None:
        next(self.model.parameters()).add_(1)

    # -- writes that torch does not count --

    def clamp(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.02, 0.02)

    def swap_in(self) -> None:
        """Put the average in for an evaluation."""
        self._own = getattr(self, "_own", None) or [parameter.detach().clone() for parameter in self.model.parameters()]
        for parameter, tensor in zip(self.model.parameters(), self.average.tensors, strict=True):
            parameter.data.copy_(tensor)

    def swap_out(self) -> None:
        own, self._own = getattr(self, "_own", None), None
        for parameter, tensor in zip(self.model.parameters(), own or (), strict=bool(own)):
            parameter.data.copy_(tensor)

    def replace_memory(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data * 0.5

    def set_memory(self) -> None:
        parameter = next(self.model.parameters())
        other: Any = parameter.detach().clone() + 1
        parameter.data.set_(other)

    def write_view(self) -> None:
        next(self.model.parameters()).data[1:].add_(1)

    def write_natively(self) -> None:
        """As code does that is not torch's."""
        next(self.model.parameters()).detach().numpy()[...] -= 1

    def write_moment(self) -> None:
        moments = [tensor for tensor in tensors_in(self.optimizer.state_dict()) if tensor.dim()]
        for tensor in moments:
            tensor.data.mul_(0.5)

    def snapshot(self, *, commit: bool = False) -> None:
        self.snapshotter.settle()
        self.step_number += 1
        self.expected[self.step_number] = self.state()
        request = SnapshotRequest(self.step_number, 0, {}, {}, Retention(1), {}, wait=True, commit=commit)
        self.snapshotter.take(self.train_state, request, {})

    def close(self) -> None:
        self.snapshotter.settle()
        self.snapshotter.close()

    def _end_step(self) -> None:
        self.snapshotter.end_of_step()

    @torch.no_grad()
    def _change_unseen(self) -> None:
        for tensor in [*self.model.parameters(), *tensors_in(self.optimizer.state_dict())]:
            # Not through torch, which would count it.
            tensor.detach().numpy()[...] += 1

    def torn(self) -> list[int]:
        """Steps whose snapshot was staged with other bytes than their state had."""
        found = []
        for step, files in self.arenas.staged_steps.items():
            model = safetensors.torch.load(files[MODEL_NAME])
            ordered = [model[name] for name in self.model.state_dict()]
            parts = [torch.load(io.BytesIO(files[name]), weights_only=True) for name in (OPTIMIZER_NAME, "average.pt")]
            tensors = tensors_in([ordered, *parts])
            same = [torch.equal(a, b) for a, b in zip(tensors, self.expected[step], strict=True)]
            found += [] if all(same) else [step]
        return found
