"""What an optimizer must not load, although torch would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpointing.state.optimizer_memory import check_kind, check_shapes

Make = Callable[..., torch.optim.Optimizer]


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


def state_of(make: Make, *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    optimizer = make(own := parameters(*shapes), lr=0.1, **options)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("wrote", "reads", "lacking"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "momentum"),
        (torch.optim.SGD, torch.optim.AdamW, "betas"),
        (torch.optim.AdamW, torch.optim.Adagrad, "lr_decay"),
        (torch.optim.SGD, torch.optim.RMSprop, "centered"),
    ],
)
def test_a_state_of_another_kind_of_optimizer_is_refused(wrote: Make, reads: Make, lacking: str) -> None:
    state = state_of(wrote, (2,))
    with pytest.raises(ValueError, match=f"another kind of optimizer, without {lacking}"):
        check_kind(reads(parameters((2,)), lr=0.1), state)
    check_kind(wrote(parameters((2,)), lr=0.1), state)


def test_options_that_a_state_may_lack_are_not_asked_for() -> None:
    """Another version's, or DeepSpeed's AdamW's."""
    state = state_of(torch.optim.AdamW, (2,))
    for name in ("fused", "amsgrad", "decoupled_weight_decay"):
        del state["param_groups"][0][name]
    check_kind(torch.optim.AdamW(parameters((2,))), state)
    check_kind(object(), state)


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [(torch.optim.AdamW, {}, "exp_avg"), (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer")],
)
def test_a_state_in_another_order_is_refused_where_the_shapes_tell(make: Make, options: Any, name: str) -> None:
    state = state_of(make, (2, 3), (5,), **options)
    check_shapes(make(parameters((2, 3), (5,)), lr=0.1), state)
    with pytest.raises(ValueError, match=rf"parameter 0 has the shape \(5,\), its {name} \(2, 3\)"):
        check_shapes(make(parameters((5,), (2, 3)), lr=0.1), state)


def test_other_optimizers_may_keep_anything() -> None:
    class LowRank(torch.optim.AdamW):
        """Keeps moments of a projection."""

    check_shapes(LowRank(parameters((5,), (2, 3))), state_of(torch.optim.AdamW, (2, 3), (5,)))
