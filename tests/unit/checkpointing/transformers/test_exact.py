"""What a Trainer's loop computes with virtual ranks; whole trainings are in tests/integration/test_exact.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.data.dealing import Dealing
from checkpointing.errors import CheckpointError
from checkpointing.transformers import _virtual_ranks
from checkpointing.transformers.exact import AUTO, ExactMixin, ExactSteps, altered, as_virtual_ranks, check_exact, own


def test_ranks_with_fewer_micro_batches_begin_with_fillers() -> None:
    steps = ExactSteps(Dealing(5, 1, 2), seed=0)
    # Of three virtual ranks with two micro-batches each, on the other rank.
    assert steps.draw(6) == 4
    assert steps.arrange(["3a", "4a", "3b", "4b"]) == ["3a", "3a", "3a", "3b", "4a", "4b"]
    assert steps._plan == [None, None, (3, 0), (3, 1), (4, 0), (4, 1)]


class Plain:
    """In place of the Trainer."""

    accelerator: Any

    def get_batch_samples(self, batches: Any, count: int) -> tuple[list[Any], int]:
        return [next(batches) for _ in range(count)], count

    def compute_loss(self) -> int:
        return int(self.accelerator.num_processes)

    def floating_point_ops(self, inputs: Any) -> int:
        return 7

    def _track_num_input_tokens(self, inputs: dict[str, torch.Tensor]) -> None:
        self.tokens = inputs["input_ids"].numel()

    def training_step(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.tensor(float(inputs))


class Trainer(ExactMixin, Plain):
    args: Any

    def __init__(self) -> None:
        self.accelerator = Accelerator()


class Accelerator:
    num_processes = 2


def test_a_loss_is_scaled_by_the_number_of_virtual_ranks() -> None:
    trainer = Trainer()
    assert trainer.compute_loss() == 2
    assert trainer.get_batch_samples(iter(range(9)), 3) == ([0, 1, 2], 3)
    assert float(trainer.training_step(None, 4)) == 4
    trainer._exact = ExactSteps(Dealing(8, 1, 2), seed=0)
    assert trainer.compute_loss() == 8 and type(trainer.accelerator) is Accelerator
    assert trainer.get_batch_samples(iter(range(9)), 4) == ([0, 1, 2, 3], 4)


def test_micro_batches_that_only_fill_up_count_nothing() -> None:
    trainer, inputs = Trainer(), {"input_ids": torch.ones(2, 3), "number": torch.tensor(1), "note": "text"}
    trainer.args = SimpleNamespace(include_num_input_tokens_seen="all")
    trainer._exact = ExactSteps(Dealing(8, 1, 2), seed=0)
    for filled, expected in ((False, (7, 6)), (True, (0, 0))):
        trainer._exact.filled = filled
        trainer._track_num_input_tokens(inputs)
        assert (trainer.floating_point_ops(inputs), trainer.tokens) == expected
    trainer.args.include_num_input_tokens_seen = "no"
    trainer._track_num_input_tokens(inputs)
    # The Trainer itself has to see what it was given.
    assert trainer.tokens == 6


def test_a_loss_that_is_known_counts_once() -> None:
    steps = ExactSteps(Dealing(3, 0, 2), seed=0)
    for _ in range(2):
        steps.arrange(["0a", "1a"])
        assert [float(steps.once(torch.tensor(6.0))) for _ in range(2)] == [6.0, 0.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("is_fsdp_enabled", "FSDP"),
        ("is_deepspeed_enabled", "DeepSpeed"),
        ("average_tokens_across_devices", "average_tokens_across_devices=False"),
        (None, None),
    ],
)
def test_what_shards_the_model_is_refused_by_name(name: str | None, reason: str | None) -> None:
    trainer: Any = SimpleNamespace(is_fsdp_enabled=False, is_deepspeed_enabled=False, train_dataset=[1])
    trainer.accelerator, trainer.model = SimpleNamespace(), torch.nn.Linear(1, 1)
    loader = SimpleNamespace(dispatch_batches=None, split_batches=False)
    trainer.args = SimpleNamespace(n_gpu=0, auto_find_batch_size=False, torch_compile=False, accelerator_config=loader)
    trainer.args.average_tokens_across_devices = name != "average_tokens_across_devices"
    if name is None:
        check_exact(trainer)
        return
    setattr(trainer, name, True)
    with pytest.raises(CheckpointError, match=f"not possible with {reason}"):
        check_exact(trainer)


def test_out_of_memory_first_costs_speed_and_then_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_virtual_ranks(None), _virtual_ranks(8), _virtual_ranks("auto")) == (0, 8, AUTO)
    with pytest.raises(ValueError, match="virtual_ranks is 0"):
        _virtual_ranks(0)
    monkeypatch.setattr("checkpointing.transformers.micro_batch_divisor", lambda: 2)
    assert _virtual_ranks(8) == 8
    monkeypatch.setattr("checkpointing.transformers.micro_batch_divisor", lambda: 4)
    assert _virtual_ranks(None) == 0
    with pytest.raises(CheckpointError, match="out of memory"):
        _virtual_ranks(8)


class Processes:
    num_processes = 2

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor])

    def gather_for_metrics(self, input_data: torch.Tensor, use_gather_object: bool = False) -> torch.Tensor:
        return torch.stack([input_data, input_data])


def test_an_accelerator_stands_for_all_virtual_ranks() -> None:
    ranks, given = Processes(), torch.tensor(1.0)
    with as_virtual_ranks(ranks, 8):
        assert (ranks.num_processes, ranks.gather(given).numel()) == (8, 2)
    with pytest.raises(RuntimeError), as_virtual_ranks(ranks, 8, own):
        assert ranks.gather(tensor=given) is given
        assert ranks.gather_for_metrics(input_data=given, use_gather_object=False) is given
        raise RuntimeError
    assert (ranks.num_processes, ranks.gather_for_metrics(given).numel()) == (2, 2) and type(ranks) is Processes


def test_what_others_have_can_be_altered() -> None:
    value = {"a": (torch.tensor([1, 2]), [torch.tensor(0.5)]), "b": torch.tensor([True]), "c": "text"}
    found = altered(value)
    assert found["a"][0].tolist() == [2, 3] and float(found["a"][1][0]) == 1.5
    assert not found["b"].item() and found["c"] == "text"
