"""What a bare loop computes of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointing.errors import CheckpointError
from checkpointing.exact.gradients import ExactGradients, Shares
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.manager.data_positions import DataPositions
from checkpointing.manager.manager import CheckpointManager
from checkpointing.process.ranks import Ranks


def loader(samples: int = 10) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(samples))), batch_size=2)


def steps(count: int, ranks: Ranks, restored: list[Any] | None = None, virtual_ranks: int = 3) -> tuple[list[Any], Any]:
    """The first steps that a rank computes, and its position behind them."""
    positions = DataPositions(ranks)
    positions._restored = restored or []
    _, dealt = positions.dealt(loader(), virtual_ranks)
    found = [[(number, batch[0].tolist()) for number, batch in next(dealt)] for _ in range(count)]
    return found, dict(positions._followed[0].state(0))


def test_ranks_share_the_steps_that_one_would_compute() -> None:
    alone, position = steps(4, Ranks())
    assert alone[0] == [(0, [0.0, 1.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0])]
    # Filled up from the beginning of the epoch.
    assert alone[1] == [(0, [6.0, 7.0]), (1, [8.0, 9.0]), (2, [0.0, 1.0])]
    assert alone[2] == alone[0]
    first, _ = steps(4, Ranks(0, 2))
    second, _ = steps(4, Ranks(1, 2))
    assert [one + other for one, other in zip(first, second, strict=True)] == alone
    # From the middle of the second epoch, on another number of ranks.
    _, position = steps(3, Ranks())
    resumed, _ = steps(1, Ranks(1, 2), [position])
    assert resumed[0] == alone[3][2:]


def test_another_number_of_virtual_ranks_is_refused() -> None:
    _, position = steps(1, Ranks())
    with pytest.raises(CheckpointError, match="was made with 3 virtual ranks, and now there are 4"):
        steps(1, Ranks(), [position], 4)
    # By itself it is that of the checkpoint, or that of ranks.
    assert len(steps(1, Ranks(), [position], 0)[0][0]) == 3
    assert len(steps(1, Ranks(), virtual_ranks=0)[0][0]) == 1
    with pytest.raises(CheckpointError, match="4 ranks cannot share 3 virtual ranks"):
        steps(1, Ranks(0, 4))
    with pytest.raises(ValueError, match="has no batch"):
        next(DataPositions(Ranks()).dealt(loader(0), 2)[1])


def test_a_share_is_a_context_in_which_its_gradients_are_taken() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    batches = iter([[(0, 1.0), (1, 3.0)], [(0, 5.0), (1, 5.0)]])
    taken = []
    for shares in Shares(batches, ExactGradients(model, 2), lambda: 7):
        model.zero_grad()
        for share in shares:
            with share:
                (model.weight * share.batch).sum().backward()
        assert model.weight.grad is not None
        taken.append(float(model.weight.grad))
    assert taken == [2.0, 5.0]
    # An error of the loop is the loop's.
    model.zero_grad()
    (share,) = next(Shares(iter([[(0, 1.0)]]), ExactGradients(model, 1), lambda: 0))
    with pytest.raises(KeyError), share:
        raise KeyError("x")


def compute(model: Any, shares: Any) -> None:
    for share in shares:
        with share:
            model(torch.full((4, 1), share.batch)).square().sum().backward()


def draws(model: Any, virtual_ranks: int = 3, steps: int = 3, manager: Any = None) -> Shares:
    """Steps of virtual ranks that compute 1, 2, 3, ..."""
    batches = [[(number, number + 1.0) for number in range(virtual_ranks)] for _ in range(steps)]
    gradients = ExactGradients(model, virtual_ranks)
    note = (lambda shares: setattr(manager, "_shares", shares)) if manager is not None else lambda shares: None
    return Shares(iter(batches), gradients, lambda: 0, note)


LEFT = r"2 of 3 shares of the step were not computed \(virtual ranks 1, 2\): .* in `with share:`"


def test_a_share_that_is_left_out_is_noticed_before_the_step_counts(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    manager = CheckpointManager(tmp_path, model=model, virtual_ranks=3)
    steps = draws(model, manager=manager)
    first = next(steps)
    compute(model, first[:1])
    with pytest.raises(CheckpointError, match=LEFT):
        manager.step(1)
    with pytest.raises(CheckpointError, match=LEFT):
        next(steps)
    compute(model, first[1:])
    assert len(next(steps)) == 3
    # One that is given up, for another: that counts.
    model.zero_grad()
    other = draws(model, manager=manager)
    compute(model, next(other))
    assert manager._shares is other
    manager._shares.check_done()


def test_a_step_that_is_to_be_skipped_has_no_shares() -> None:
    steps = draws(torch.nn.Linear(1, 1))
    next(steps)
    steps.skip()
    assert len(next(steps)) == 3


@pytest.mark.parametrize("virtual_ranks", [1, 2])
def test_gradients_of_several_draws_are_not_added(virtual_ranks: int) -> None:
    model = torch.nn.Linear(1, 1)
    steps = draws(model, virtual_ranks)
    compute(model, next(steps))
    with pytest.raises(CheckpointError, match=r"there are gradients of weight .*: call model.zero_grad\(\)"):
        compute(model, next(steps))
    # Zeros are none.
    model.zero_grad(set_to_none=False)
    compute(model, next(draws(model, virtual_ranks)))
    assert model.weight.grad is not None


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (0, 1, 1), (0, 1, 2, 2)])
def test_shares_are_computed_in_order_and_once(order: tuple[int, ...]) -> None:
    model = torch.nn.Linear(1, 1)
    shares = next(draws(model))
    with pytest.raises(CheckpointError, match=r"is not the next one of this step|there are gradients of weight"):
        compute(model, [shares[number] for number in order])


def test_a_share_that_has_failed_can_be_computed_again() -> None:
    """Out of memory, in the second one, after a part of its gradients."""
    grads = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        shares = next(draws(model))
        compute(model, shares[:1])
        if fails:
            with pytest.raises(MemoryError), shares[1]:
                model(torch.ones(1, 1)).sum().backward()
                raise MemoryError
            with pytest.raises(CheckpointError, match="there are gradients of weight"):
                compute(model, shares[1:2])
            model.zero_grad()
        compute(model, shares[1:])
        grads.append(model.weight.grad)
    assert grads[0] is not None and grads[1] is not None and torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("number", [0, 2])
def test_a_share_without_gradients_is_an_error(number: int) -> None:
    model = torch.nn.Linear(1, 1)
    shares = next(draws(model))
    compute(model, shares[:number])
    with pytest.raises(CheckpointError, match=f"virtual rank {number} has no gradients: call backward"), shares[number]:
        pass


def test_sparse_gradients_and_other_parameters_are_refused() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    (share,) = next(draws(embedding, 1))
    with pytest.raises(CheckpointError, match="some gradients are sparse"), share:
        embedding(torch.tensor([1, 2])).sum().backward()
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).requires_grad_(False))
    steps = draws(model)
    compute(model, next(steps))
    model.requires_grad_(True)
    with pytest.raises(CheckpointError, match="other parameters require gradients now"):
        compute(model, next(steps))


def test_statistics_that_a_batch_changes_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(CheckpointError, match=r"cannot be exact: the statistics of 1 \(BatchNorm1d\) change"):
        compute(model, next(draws(model)))
    model[1].eval()
    steps = draws(model)
    compute(model, next(steps))
    # As after an evaluation.
    model.train()
    model.zero_grad()
    with pytest.raises(CheckpointError, match="the statistics of 1"):
        compute(model, next(steps))


class Counting(torch.nn.Linear):
    """Keeps a number of what it has seen, and one that is a schedule's."""

    def __init__(self, counts: bool) -> None:
        super().__init__(1, 1)
        self.counts = counts
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("tau", torch.tensor([torch.nan]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(float(self.counts))
        return super().forward(x)


def test_other_buffers_that_change_are_named_in_the_first_share() -> None:
    model = Counting(counts=True)
    with pytest.raises(CheckpointError, match="cannot be exact: seen change"):
        compute(model, next(draws(model)))
    model = Counting(counts=False)
    shares = next(draws(model))
    model.get_buffer("tau")[0] = 2.0
    compute(model, shares)


def test_batches_know_no_virtual_ranks(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, model=torch.nn.Linear(1, 1), virtual_ranks=2)
    with pytest.raises(ValueError, match=r"iterate over shares\(loader\)"):
        manager.batches(loader())


def test_a_run_that_counts_on_virtual_ranks_refuses_a_training_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(is_exact=True, virtual_ranks=8, location=str(tmp_path)).to_json())
    manager = CheckpointManager(model=torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"elastic.mode=exact, and this training has no virtual ranks"):
        manager.resume()
    other = CheckpointManager(model=torch.nn.Linear(1, 1), virtual_ranks=4)
    with pytest.raises(CheckpointError, match=r"elastic.virtual_ranks is 8, and the script's virtual_ranks 4"):
        other.shares(loader())
    settings = RankSettings(is_exact=True, virtual_ranks=8)
    assert settings.virtual_ranks_of("auto") == settings.virtual_ranks_of(8) == 8
    assert RankSettings(is_exact=True).virtual_ranks_of("auto") == "auto"
    assert RankSettings(is_exact=True).virtual_ranks_of(4) == RankSettings().virtual_ranks_of(4) == 4
    assert RankSettings().virtual_ranks_of(None) is None


def test_shares_need_virtual_ranks(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"shares\(\) is for CheckpointManager"):
        manager.shares(loader())
    with pytest.raises(ValueError, match=r"check_exact\(\) comes after shares\(\)"):
        manager.check_exact(None, lambda batch: None)
