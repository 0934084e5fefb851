"""What cannot be exact is found before the first step: a micro-batch is computed twice, and by all ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError

if TYPE_CHECKING:
    from checkpointing.exact.gradients import ExactGradients

_WHAT_TO_DO = (
    "Use deterministic kernels (torch.use_deterministic_algorithms(True)) and the same kind of device for all ranks, "
    "or train without virtual ranks (elastic.mode)"
)


@dataclass(frozen=True)
class _Trace:
    """One computation of a micro-batch: digests of what modules returned, in order, and of the gradients, by name."""

    outputs: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    buffers: tuple[str, ...]

    def difference(self, other: _Trace) -> str | None:
        """Return what differs first: a module, or the gradient of a parameter."""
        pairs = (("output", self.outputs, other.outputs), ("gradient", self.gradients, other.gradients))
        for what, mine, theirs in pairs:
            for (name, digest), (_, other_digest) in zip(mine, theirs, strict=False):
                if digest != other_digest:
                    return f"the {what} of {name}"
        return None


class Buffers:
    """The buffers of a model, without DDP, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the values from before of those that have changed, by name."""
        now = dict(self._model.named_buffers())
        return {name: was for name, was in self._before.items() if name in now and not _are_equal(now[name], was)}

    def check(self) -> None:
        """Check that none has changed; the error names those that have."""
        if changed := self.changed():
            raise CheckpointError(changing(tuple(changed)))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether they hold the same values; NaN equals itself."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def changing(names: tuple[str, ...]) -> str:
    """Return what to say of buffers that change while a micro-batch is computed."""
    return (
        f"virtual ranks cannot be exact: {_named(names)} change while a micro-batch is computed, so that they depend "
        "on which ones a rank has computed before. Freeze such statistics (BatchNorm in evaluation mode), use layers "
        "without (GroupNorm, LayerNorm), or train without virtual ranks (elastic.mode)"
    )


class SelfTest:
    """Computes one micro-batch of each rank twice, and that of the first rank on all, and compares all bits."""

    def __init__(self, gradients: ExactGradients, model: torch.nn.Module) -> None:
        self._gradients, self._model = gradients, model

    def run(
        self, batch: Any, compute: Callable[[Any], Any], with_others_altered: Callable[[Any], Any] | None = None
    ) -> None:
        """Compute a micro-batch, and compare; every rank calls it. Nothing of the training has changed then.

        `compute` computes forward and backward; `with_others_altered` likewise, but all that is gathered from other
        ranks
        has other values.

        Raises:
            CheckpointError: Something differs; the message names the module.
        """
        mine = self._traced(batch, compute, self._gradients.block[0])
        again = self._traced(batch, compute, self._gradients.block[0])
        # Whatever was found: there are collectives in it.
        altered = self._traced(batch, with_others_altered, self._gradients.block[0]) if with_others_altered else mine
        problem = None
        if mine.buffers:
            problem = changing(mine.buffers)
        elif (found := mine.difference(again)) is not None:
            problem = (
                f"virtual ranks cannot be exact: the same micro-batch computed twice differs, first in {found}. "
                f"{_WHAT_TO_DO}"
            )
        elif (found := mine.difference(altered)) is not None:
            problem = (
                "virtual ranks cannot be exact: the loss depends on what it gathers from other ranks, first in "
                f"{found}. Use a loss of each micro-batch by itself, or train without virtual ranks (elastic.mode)"
            )
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        everyone = gathered((problem, (_on_host(batch), self._gradients.block[0], mine) if is_first else None))
        _raise_first([problem for problem, _ in everyone])
        if len(everyone) == 1:
            return
        # All the same one: a loss that gathers something from other ranks differs then, too.
        first_batch, virtual_rank, first = everyone[0][1]
        found = self._traced(first_batch, compute, virtual_rank).difference(first)
        if found is not None:
            problem = (
                "virtual ranks cannot be exact: this rank and the first one compute the same micro-batch differently, "
                f"first in {found}. {_WHAT_TO_DO}. A loss that depends on what other ranks compute cannot be exact, "
                "either"
            )
        _raise_first(gathered(problem))

    def _traced(self, batch: Any, compute: Callable[[Any], Any], virtual_rank: int) -> _Trace:
        outputs: list[tuple[str, str]] = []
        buffers = Buffers(self._model)
        with self._watched(outputs), self._gradients.unsummed(), self._gradients.drawing(virtual_rank, 0, 0):
            compute(batch)
        gradients = []
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                gradients.append((name, _digest(parameter.grad)))
                parameter.grad = None
        changed, now = buffers.changed(), dict(self._model.named_buffers())
        with torch.no_grad():
            for name, was in changed.items():
                now[name].copy_(was)
        return _Trace(tuple(outputs), tuple(gradients), tuple(changed))

    @contextlib.contextmanager
    def _watched(self, outputs: list[tuple[str, str]]) -> Iterator[None]:
        """Record what each module without parts returns."""

        def watch(name: str, module: torch.nn.Module) -> Any:
            def note(_: Any, __: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor):
                    outputs.append((f"{name} ({type(module).__name__})", _digest(output)))

            return module.register_forward_hook(note)

        handles = [watch(name, one) for name, one in self._model.named_modules() if not any(one.children())]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _raise_first(problems: list[str | None]) -> None:
    """Raise the first problem, on all ranks."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(problem if len(problems) == 1 else f"rank {rank}: {problem}")


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict) or hasattr(value, "items"):
        return {key: _on_host(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(one) for one in value)
    return value


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more buffers" if names[3:] else "")
