"""What cannot be exact is named before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from checkpointing.errors import CheckpointError
from checkpointing.exact.gradients import ExactGradients
from checkpointing.exact.self_test import SelfTest


class Drifting(torch.nn.Module):
    """A kernel that adds in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 1e-7 * self.calls)


class DriftingBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        DriftingBackward.calls += 1
        return grads[0] * (1 + 1e-6 * DriftingBackward.calls)


class Wrapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = DriftingBackward.apply(x)  # type: ignore[no-untyped-call]
        return found


def run(*layers: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *layers, torch.nn.Linear(4, 1))

    def compute(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    SelfTest(ExactGradients(model, 2), model).run(torch.ones(3, 4), compute)
    return model


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(3)
    yield


def test_what_is_exact_passes_and_leaves_nothing_behind() -> None:
    model = run(torch.nn.Dropout(0.5), torch.nn.LayerNorm(4))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    after = torch.random.get_rng_state()
    torch.manual_seed(3)
    # Drawn as the model is made, and no more.
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    assert torch.equal(torch.random.get_rng_state(), after)


def test_running_statistics_are_named_and_put_back() -> None:
    norm = torch.nn.BatchNorm1d(4)
    with pytest.raises(CheckpointError, match=r"1\.running_mean, 1\.running_var, 1\.num_batches_tracked change"):
        run(norm)
    assert norm.num_batches_tracked is not None and int(norm.num_batches_tracked) == 0
    run(torch.nn.BatchNorm1d(4, track_running_stats=False))


def test_a_kernel_that_adds_in_any_order_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"differs, first in the output of 1 \(Drifting\)"):
        run(Drifting())
    with pytest.raises(CheckpointError, match=r"differs, first in the gradient of 0\.weight"):
        run(Wrapped())


def test_a_loss_that_depends_on_other_ranks_is_found_on_a_single_one() -> None:
    model, others = torch.nn.Linear(4, 1), [1.0]

    def compute(batch: torch.Tensor) -> None:
        (model(batch).sum() / others[0]).backward()

    def with_others_altered(batch: torch.Tensor) -> None:
        others[0] = 2.0
        compute(batch)
        others[0] = 1.0

    test = SelfTest(ExactGradients(model, 2), model)
    test.run(torch.ones(3, 4), compute)
    test.run(torch.ones(3, 4), compute, compute)
    with pytest.raises(CheckpointError, match="depends on what it gathers from other ranks, first in the gradient of"):
        test.run(torch.ones(3, 4), compute, with_others_altered)
