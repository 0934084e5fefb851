"""The training data of a resilient trainer: its own loader with a cursor, or a seekable stream."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import accelerate
import torch
import transformers.trainer

from checkpointing.data.cursor import LoaderCursor
from checkpointing.data.dealing import Dealing, StepLayout
from checkpointing.data.stream import StreamBatches, StreamDataLoader, StreamPosition
from checkpointing.errors import CheckpointError
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.environment import rank_settings
from checkpointing.manager.manager import CheckpointManager
from checkpointing.transformers.job_shape import DataRanks, check_same_job, check_samples_per_step, fit_layout
from checkpointing.transformers.loop_state import JobRecord

logger = logging.getLogger("checkpointing")

# Seconds that a stream may take for a batch before the step is paused; less than the smallest hang timeout.
_STREAM_PATIENCE_S = 1.0
# What cross-entropy ignores.
_IGNORED = -100
_LABELS = ("labels", "shift_labels")


class TrainingData:
    """The data of one training, and the position in it.

    Args:
        manager: Saves the position.
        args: The trainer's `TrainingArguments`.
        layout: How steps are divided if the run begins now.
        ranks: How the ranks share samples.
        beginning: State of a seekable stream at the beginning of an epoch; None for other data.
        shuffle_samples: See `StreamBatches`.
        uneven: Whether ranks may have different numbers of samples in a step.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        args: Any,
        *,
        layout: StepLayout,
        ranks: DataRanks,
        beginning: Mapping[str, Any] | None = None,
        shuffle_samples: int | None = None,
        uneven: bool = False,
    ) -> None:
        self._dealing: Dealing | None = None
        self._uneven = uneven and beginning is None
        self._manager, self._args, self._ranks = manager, args, ranks
        # How steps were divided when the run began.
        self.layout = layout
        self._beginning, self._shuffle_samples = beginning, shuffle_samples
        # The position in the trainer's own loader; None if it cannot be followed, or before the loader is made.
        self.cursor: LoaderCursor | None = None
        # What reads a seekable stream; None without one.
        self.stream: StreamDataLoader | None = None
        self._stream_position: StreamPosition | None = None
        self._uneven_samples = 0

    @property
    def is_followed(self) -> bool:
        """Whether a resumed run continues behind the last batch."""
        return self.cursor is not None or self.stream is not None

    @property
    def is_stream(self) -> bool:
        """Whether the data is read by the stream's own state."""
        return self._beginning is not None

    @property
    def shared_samples(self) -> int | None:
        """Samples of a step, if any number of ranks can share them; None if they must divide it."""
        if self._dealing is not None:
            return self._dealing.virtual_ranks
        return self.layout.samples_per_step if self._uneven and self.cursor is not None else None

    @property
    def _seed(self) -> int:
        return int(self._args.data_seed if self._args.data_seed is not None else self._args.seed)

    def deal(self, dealing: Dealing) -> None:
        """Have virtual ranks share the steps; call it before `fit` and `resume`."""
        self._dealing, self.layout = dealing, replace(self.layout, world_size=dealing.virtual_ranks)

    def fit(self, batch_size: int) -> StepLayout | None:
        """Divide the samples of a step among the ranks that there are; None keeps the configured layout."""
        if self._dealing is not None:
            return StepLayout(
                self._ranks.count, self.layout.batch_size, self._dealing.largest * self.layout.accumulation
            )
        samples, ranks, elastic = self.layout.samples_per_step, self._ranks.count, rank_settings().planned_ranks
        if elastic and samples % ranks and not (self._uneven and samples > ranks):
            raise CheckpointError(
                f"a step has {samples} samples, which {ranks} ranks cannot share equally. Choose "
                "per_device_train_batch_size or gradient_accumulation_steps so that they can, or --nnodes MIN:MAX"
            )
        fitted = fit_layout(self.layout, ranks, batch_size, uneven=bool(elastic) and self._uneven)
        self._uneven_samples = fitted.uneven_samples if fitted is not None else 0
        return fitted

    def resume(
        self, point: LoadedCheckpoint, record: JobRecord, job: Mapping[str, Any], batch_size: int
    ) -> StepLayout | None:
        """Prepare for the loader of a resumed run of the same job, and return what `fit` returns."""
        self._stream_position = record.stream
        if (record.stream is not None) != self.is_stream:
            before, now = ("not streamed", "is streamed") if self.is_stream else ("streamed", "is not")
            raise CheckpointError(
                f"{point.label} cannot be resumed: its data was {before}, and now {now}, so that the position is "
                "unknown. Read the data as before, or train in another output_dir"
            )
        check_same_job(point.label, record.job, job)
        self.layout = record.layout or self.layout
        return self.fit(batch_size)

    def forget_loader(self) -> None:
        """Follow no loader: another one is about to be made."""
        self.cursor = self.stream = None
        self._manager.forget_positions()

    def follow(self, loader: Any, batch_size: int, point: LoadedCheckpoint | None) -> Any:
        """Follow the trainer's own loader, which is changed in place; returns it."""
        args = self._args
        now = StepLayout(self._ranks.count, batch_size, args.gradient_accumulation_steps, self._uneven_samples)
        now = now if self._dealing is None else self.layout
        if args.auto_find_batch_size and point is None:
            # The Trainer may restart with smaller batches.
            self.layout = now
        check_samples_per_step(point, now.samples_per_step)
        try:
            seed, rank = self._seed, self._ranks.rank
            cursor = LoaderCursor(loader, seed=seed, rank=rank, made_for=self.layout, now=now, dealing=self._dealing)
        except CheckpointError as error:
            if self.layout != now or self._dealing is not None:
                raise
            logger.warning("%s: a resumed run reads it again from the beginning, as the Trainer does", error)
            return loader
        self.cursor = cursor
        self._manager.follow(cursor, self._ranks.group_size)
        return loader

    def read_stream(
        self, dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int, point: LoadedCheckpoint | None
    ) -> StreamDataLoader:
        """Make the loader of a seekable stream."""
        args = self._args
        check_samples_per_step(point, batch_size * args.gradient_accumulation_steps * self._ranks.count)
        batches = StreamBatches(
            dataset,
            batch_size,
            self._ranks.rank,
            self._ranks.count,
            seed=self._seed,
            shuffle_samples=self._shuffle_samples,
            beginning=self._beginning,
        )
        self.stream = StreamDataLoader(
            batches,
            collate,
            args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        if self._stream_position is not None:
            self.stream.start_at(self._stream_position)
        return self.stream

    def resume_position(
        self, point: LoadedCheckpoint | None, by_steps: tuple[int, int], steps_per_epoch: int
    ) -> tuple[int, int]:
        """Set the loader to a checkpoint's position; return the epoch, and the number of its batches to skip."""
        if point is None or self.cursor is None or self._args.ignore_data_skip:
            return by_steps
        saved = self._manager.positions_in(point)
        if not saved:
            self.cursor.skip(by_steps[1])
            return by_steps
        with point.reading("its position in the data"):
            epoch, count = self.cursor.resume(saved[0], steps_per_epoch)
        return epoch, count if self._dealing is None else self._dealing.count_here(count)

    def weighed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Iterate over the batches of a step; what only fills up this rank's share of it has no labels."""
        cursor = self.cursor
        if not self._uneven_samples or cursor is None:
            return batches
        # No `yield from`: its end would be that of the epoch's iterator.
        numbered = enumerate(batches, cursor.consumed)
        return (_without_labels(batch) if cursor.is_filler(number) else batch for number, batch in numbered)

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Note each draw: the Trainer counts the items of all ranks next, and waits for the slowest of them."""
        for batch in batches:
            self._manager.batch_drawn()
            yield batch

    def consume(self, num_batches: int) -> None:
        """Count batches that training has drawn; a stream counts by itself."""
        if self.cursor is not None:
            self.cursor.consume(num_batches if self._dealing is None else self._dealing.count_of_all(num_batches))

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Wait for a batch: a stream that is slow for once is not a hang, so the step is paused until it answers."""
        if self.stream is None:
            yield
            return
        pause = threading.Timer(_STREAM_PATIENCE_S, self._manager.pause)
        pause.daemon = True
        pause.start()
        try:
            yield
        finally:
            pause.cancel()


def _without_labels(batch: Any) -> Any:
    """Return a batch none of whose tokens counts; one without labels cannot say so (KeyError)."""
    if not any(name in batch for name in _LABELS):
        raise KeyError(f"a batch needs labels, and has {', '.join(map(str, batch))}")
    for name in _LABELS:
        if name in batch:
            batch[name] = torch.full_like(batch[name], _IGNORED)
    return batch


class _Rest:
    """What an iterable yields after its first batches, which are made and dropped.

    Args:
        batches: Anything that can be iterated over.
        num_dropped: Number of batches.
    """

    def __init__(self, batches: Any, num_dropped: int) -> None:
        self._batches, self._num_dropped = batches, num_dropped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._batches), self._num_dropped, None)

    def __len__(self) -> int:
        return max(len(self._batches) - self._num_dropped, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Replace accelerate's `skip_first_batches`: by position where the loader is followed."""
    if isinstance(dataloader, StreamDataLoader):
        if not dataloader.is_positioned:
            dataloader.drop_first(num_batches)
        return dataloader
    cursor = LoaderCursor.of(dataloader)
    if cursor is None:
        # What is no DataLoader has no data set to make one of without the first batches.
        known = hasattr(dataloader, "dataset")
        return accelerate.skip_first_batches(dataloader, num_batches) if known else _Rest(dataloader, num_batches)
    if cursor.skips_epoch:
        return dataloader
    if not cursor.resumes_mid_epoch:
        # A stock checkpoint knows only the number of batches.
        cursor.skip(num_batches)
    return cursor.remaining()


# The Trainer's loop calls this name and offers no hook. accelerate's function would build another loader, whose batches
# the cursor would not see.
transformers.trainer.skip_first_batches = _skip_first_batches


@contextlib.contextmanager
def skipping_by_position() -> Iterator[None]:
    """Have the Trainer's loop skip by position, also where a framework has put a function of its own in its place.

    ms-swift makes another loader without the first batches, which the cursor would not see.
    """
    theirs = transformers.trainer.skip_first_batches

    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        is_followed = isinstance(dataloader, StreamDataLoader) or LoaderCursor.of(dataloader) is not None
        return (_skip_first_batches if is_followed else theirs)(dataloader, num_batches)

    transformers.trainer.skip_first_batches = skip
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = theirs
