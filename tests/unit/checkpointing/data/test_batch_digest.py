"""What of a batch's contents tells samples from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.data.batch_digest import batch_digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])]),
        ({"a": ["text"]}, {"a": ["texts"]}),
        (np.arange(3), np.arange(3) + 1),
        ((1, (2,)), (1, (3,))),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        # Nothing but numbers that are not whole.
        (torch.tensor([0.5]), torch.tensor([0.25])),
        ([0.5, np.float32(1)], [0.5, np.float32(2)]),
        ({"x": torch.zeros(2, 0)}, {"x": torch.zeros(3, 0)}),
    ],
)
def test_other_samples_have_another_digest(one: Any, other: Any) -> None:
    assert batch_digest(one) != batch_digest(other) and batch_digest(one) == batch_digest(one)


@pytest.mark.parametrize("noise", [torch.rand(3, 2), np.random.rand(2), 0.25, torch.rand(2).bfloat16(), 1j])
def test_augmentation_of_samples_that_have_labels_changes_nothing(noise: Any) -> None:
    zero = noise * 0
    assert batch_digest({"x": noise, "label": torch.tensor([3])}) == batch_digest(
        {"x": zero, "label": torch.tensor([3])}
    )


def test_of_a_large_tensor_a_part_is_read() -> None:
    large = torch.zeros(1_000_000, dtype=torch.uint8)
    changed = large.clone()
    changed[1] = 1
    assert batch_digest(large) == batch_digest(changed) != batch_digest(large + 1)
    assert batch_digest(object()) == batch_digest(object())
