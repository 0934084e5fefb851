"""Which loaders are followed, and from where on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from checkpointing.data.cursor import LoaderCursor
from checkpointing.errors import CheckpointError
from checkpointing.lightning.data import FollowedLoaders


def loader(length: int = 12, **options: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(length)), 2, **options)


def trainer(**fields: Any) -> Any:
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    defaults = {"strategy": strategy, "training": True, "sanity_checking": False, "current_epoch": 0}
    return SimpleNamespace(**{**defaults, **fields})


def followed(subject: Any, positions: Any = ()) -> tuple[FollowedLoaders, Any]:
    manager = Mock(rank=0)
    loaders = FollowedLoaders(subject, manager, positions)
    return loaders, manager


def rows(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def test_only_training_loaders_are_followed() -> None:
    subject = trainer(training=False)
    loaders, manager = followed(subject)
    assert LoaderCursor.of(subject.strategy.process_dataloader(loader())) is None
    subject.training, subject.sanity_checking = True, True
    assert LoaderCursor.of(subject.strategy.process_dataloader(loader())) is None
    subject.sanity_checking = False
    assert LoaderCursor.of(subject.strategy.process_dataloader(loader())) is not None
    manager.follow.assert_called_once()
    loaders.remove()
    assert LoaderCursor.of(subject.strategy.process_dataloader(loader())) is None


@pytest.mark.parametrize("consumed", [0, 2])
def test_an_epoch_is_continued_in_its_own_order(consumed: int) -> None:
    torch.manual_seed(0)
    subject = trainer(current_epoch=3)
    loaders, manager = followed(subject)
    batches = iter(subject.strategy.process_dataloader(loader(shuffle=True)))
    # Lightning has drawn the next batch when it saves.
    drawn = [next(batches) for _ in range(consumed + 1)]
    for _ in range(consumed):
        loaders.consume()
    position = manager.follow.call_args.args[0].state()
    assert (position["epoch"], position["consumed"]) == (3, consumed)
    torch.manual_seed(1)
    again = trainer(current_epoch=3)
    followed(again, [position])
    resumed = rows(again.strategy.process_dataloader(loader(shuffle=True)))
    assert resumed == rows(drawn[consumed:]) + rows(batches)


def test_the_next_epoch_begins_at_its_first_batch() -> None:
    subject = trainer()
    loaders, manager = followed(subject)
    training = subject.strategy.process_dataloader(loader())
    assert len(rows(training)) == 6
    for _ in range(6):
        loaders.consume()
    loaders.end_epoch()
    cursor = manager.follow.call_args.args[0]
    assert cursor.state()["over"]
    loaders.begin_epoch(1)
    assert (cursor.epoch, cursor.consumed) == (1, 0)
    assert len(rows(training)) == 6


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_what_cannot_be_followed_is_refused() -> None:
    subject = trainer()
    followed(subject)
    with pytest.raises(CheckpointError, match="list is not a torch DataLoader"):
        subject.strategy.process_dataloader([1, 2])
    with pytest.raises(CheckpointError, match="reads a batch ahead"):
        subject.strategy.process_dataloader(Stateful(Stream()))
    again = trainer()
    followed(again, [{"epoch": 0}])
    with pytest.raises(CheckpointError, match="resume from another step"):
        again.strategy.process_dataloader(loader())


@pytest.mark.parametrize(
    ("lengths", "mode", "refused"),
    [
        ((12,), "max_size_cycle", False),
        ((12, 12), "max_size_cycle", False),
        ((12, 8), "max_size_cycle", True),
        ((12, 8), "min_size", False),
    ],
)
def test_loaders_that_begin_again_within_an_epoch(lengths: tuple[int, ...], mode: Any, refused: bool) -> None:
    combined = CombinedLoader([loader(length) for length in lengths], mode)
    subject = trainer(fit_loop=SimpleNamespace(_data_fetcher=Mock(), _combined_loader=combined))
    loaders, _ = followed(subject)
    combined.flattened = [subject.strategy.process_dataloader(one) for one in combined.flattened]
    if refused:
        with pytest.raises(CheckpointError, match="min_size"):
            loaders.check()
    else:
        loaders.check()
