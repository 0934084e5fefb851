"""Whose loss gives each token the same weight on every rank, and what has no weight at all."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from checkpointing.transformers.job_shape import can_be_uneven, weighs_by_tokens, without_labels


class Ours(Trainer):
    """As `resilient` makes it."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


Ours.__module__ = "checkpointing.transformers.trainer"


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


ARGS = {
    "average_tokens_across_devices": True,
    "label_smoothing_factor": 0.0,
    "use_liger_kernel": False,
    "n_gpu": 0,
}


def trainer(cls: type = Ours, **changes: Any) -> Any:
    made: Any = object.__new__(cls)
    vars(made).update(
        args=SimpleNamespace(**{name: changes.pop(name, value) for name, value in ARGS.items()}),
        model=SimpleNamespace(config=SimpleNamespace(output_router_logits=changes.pop("output_router_logits", False))),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        is_deepspeed_enabled=False,
    )
    vars(made).update(changes)
    return made


@pytest.mark.parametrize("cls", [Trainer, Ours])
def test_the_trainers_own_loss_does(cls: type) -> None:
    assert weighs_by_tokens(trainer(cls))


@pytest.mark.parametrize(
    "changes",
    [
        {"cls": OwnLoss},
        {"cls": OwnStep},
        {"model_accepts_loss_kwargs": False},
        {"compute_loss_func": sum},
        {"average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
        {"use_liger_kernel": True},
        {"n_gpu": 2},
        {"aux_loss_enabled": True},
        {"output_router_logits": True},
    ],
    ids=str,
)
def test_others_need_not(changes: dict[str, Any]) -> None:
    assert not weighs_by_tokens(trainer(**changes))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(("data", "can"), [([1, 2], True), (iter([1]), False), (Endless(), False), (None, False)])
def test_a_stream_is_dealt_while_it_is_read(data: Any, can: bool) -> None:
    assert can_be_uneven(trainer(train_dataset=data)) is can
    assert not can_be_uneven(trainer(OwnLoss, train_dataset=data))
    assert not can_be_uneven(trainer(train_dataset=data, is_deepspeed_enabled=True))


def test_a_batch_without_labels_counts_for_nothing() -> None:
    batch = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3, dtype=torch.long)}
    assert without_labels(batch)["labels"].tolist() == [[-100] * 3] and batch["input_ids"].sum() == 3
    shifted = {"shift_labels": torch.ones(1, 2, dtype=torch.long)}
    assert without_labels(shifted)["shift_labels"].tolist() == [[-100] * 2]
    with pytest.raises(KeyError, match="needs labels, and has input_ids"):
        without_labels({"input_ids": torch.ones(1)})
