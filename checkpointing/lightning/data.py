"""The training loaders of a Lightning trainer, each with a cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpointing.data.cursor import LoaderCursor
from checkpointing.errors import CheckpointError
from checkpointing.manager.data_positions import resume_at
from checkpointing.manager.manager import CheckpointManager


class FollowedLoaders:
    """Attaches a cursor to each training loader when Lightning prepares it, just before the first batch is drawn."""

    def __init__(self, trainer: Any, manager: CheckpointManager, positions: Sequence[Mapping[str, Any]]) -> None:
        """Have the strategy, through which Lightning passes every loader, attach cursors; `remove` undoes it.

        The positions are those of the checkpoint that is resumed, in the loaders' order.
        """
        self._trainer, self._manager, self._positions = trainer, manager, positions
        self._cursors: list[LoaderCursor] = []
        # There is no hook between the creation of the loaders and that of their iterators.
        trainer.strategy.process_dataloader = self._process

    def remove(self) -> None:
        """Leave the strategy as it was."""
        vars(self._trainer.strategy).pop("process_dataloader", None)

    def _process(self, dataloader: Any) -> Any:
        strategy, trainer = self._trainer.strategy, self._trainer
        dataloader = type(strategy).process_dataloader(strategy, dataloader)
        if not trainer.training or trainer.sanity_checking:
            return dataloader
        cursor = LoaderCursor(dataloader, seed=torch.initial_seed(), rank=self._manager.rank)
        if cursor.is_stream and hasattr(dataloader, "state_dict"):
            raise CheckpointError(
                f"ResilientCheckpoint cannot follow {type(dataloader).__name__} over an IterableDataset: Lightning "
                "reads a batch ahead. Use a DataLoader, which is read again up to the position"
            )
        number = len(self._cursors)
        if number < len(self._positions):
            resume_at(cursor, self._positions[number])
        self._cursors.append(cursor)
        self._manager.follow(cursor)
        cursor.begin_epoch(trainer.current_epoch)
        return cursor.remaining()

    def check(self) -> None:
        """Refuse what cannot be followed, once all loaders are there.

        Raises:
            CheckpointError: A loader begins again within an epoch, or batches are drawn in `training_step`.
        """
        fit_loop = self._trainer.fit_loop
        fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
        if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
            raise CheckpointError("ResilientCheckpoint cannot follow training_step(dataloader_iter): use a batch")
        if combined is not None and len(self._cursors) > 1 and combined._mode != "min_size":
            both = zip(combined.flattened, self._cursors, strict=True)
            lengths = {len(loader) if not cursor.is_stream else None for loader, cursor in both}
            if len(lengths) > 1 or None in lengths:
                raise CheckpointError(
                    "ResilientCheckpoint cannot follow loaders of different lengths, of which the shorter ones begin "
                    'again within an epoch: use CombinedLoader(..., mode="min_size")'
                )

    def begin_epoch(self, epoch: int) -> None:
        """Announce that the next batches are of this epoch; the first one has begun when its loader was made."""
        for cursor in self._cursors:
            if cursor.epoch != epoch:
                cursor.begin_epoch(epoch)

    def consume(self) -> None:
        """Count a batch that training has used."""
        for cursor in self._cursors:
            cursor.consume(1)

    def end_epoch(self) -> None:
        """Record that the epoch is over."""
        for cursor in self._cursors:
            cursor.end_epoch()
