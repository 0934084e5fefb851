"""The position in a stream, by the stream's own `state_dict`.

A stream is read in blocks. The position is the state at the beginning of a block and an offset in it, so that a resumed
run reads at most one block again. All ranks read the whole stream, and each takes its share of every global batch: the
samples of a step are the same for every world size.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from packaging.version import Version
from torch.utils.data import DataLoader, IterableDataset

from checkpointing.errors import CheckpointError

# Size of a block where nothing is shuffled.
_BLOCK_SAMPLES = 64
_END = object()


@dataclass(frozen=True)
class StreamPosition:
    """How far a stream has been read; the same on all ranks.

    Attributes:
        epoch: Number of times that the stream was read to its end.
        block: Number of the block in this epoch.
        offset: Samples of the block that were returned.
        state: The stream's own state at the beginning of the block; JSON can hold it.
        shuffle_samples: Samples per block that are shuffled; None for the stream's own order.
        seed: Seed of the order of the samples in a block.
    """

    epoch: int
    block: int
    offset: int
    state: Mapping[str, Any]
    shuffle_samples: int | None
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> StreamPosition:
        """Parse what `to_json` returned.

        Raises:
            ValueError: The document is something else.
        """
        if not isinstance(document, dict) or document.keys() != {field.name for field in fields(cls)}:
            raise ValueError("the position in the stream has other fields")
        size = document["shuffle_samples"]
        counts = [document[name] for name in ("epoch", "block", "offset", "seed")] + ([] if size is None else [size])
        if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or size == 0:
            raise ValueError("a number of the position in the stream is not a count")
        if not isinstance(document["state"], dict):
            raise ValueError("the stream's state is not an object")
        return cls(**document)


class StreamBatches(IterableDataset):  # type: ignore[type-arg]
    """Micro-batches of one rank from a stream, without end: the first sample follows the last one.

    Each item is a list of samples and the position behind them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle_samples: int | None = None,
        beginning: Mapping[str, Any] | None = None,
    ) -> None:
        """Read a data set, which has `state_dict` and `load_state_dict`, such as `datasets.IterableDataset`.

        The rank is one of those that share each global batch. The stream's own order is kept where `shuffle_samples`,
        the samples per block that are shuffled, is None; its present state is that at the beginning of an epoch where
        `beginning` is None.

        Raises:
            CheckpointError: JSON cannot hold the stream's state.
        """
        self._dataset = dataset
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._beginning = _copied(beginning if beginning is not None else dataset.state_dict())
        self.start = StreamPosition(0, 0, 0, self._beginning, shuffle_samples, seed)

    def start_at(self, position: StreamPosition) -> None:
        """Begin the next iteration at a position.

        Raises:
            CheckpointError: The position belongs to another order.
        """
        if (position.shuffle_samples, position.seed) != (self.start.shuffle_samples, self.start.seed):
            raise CheckpointError(
                f"the position in the stream does not fit: it was read with shuffle_samples={position.shuffle_samples} "
                f"and seed {position.seed}, and now has {self.start.shuffle_samples} and {self.start.seed}. Use the "
                "former, or train in another output_dir"
            )
        self.start = position

    def __iter__(self) -> Iterator[tuple[list[Any], StreamPosition]]:
        samples, share = self._samples(), self._rank * self._batch_size
        while True:
            drawn = list(itertools.islice(samples, self._batch_size * self._world_size))
            yield [sample for sample, _ in drawn[share : share + self._batch_size]], drawn[-1][1]

    def _samples(self) -> Iterator[tuple[Any, StreamPosition]]:
        """Iterate over samples, each with the position behind it."""
        at = self.start
        reader = _BlockReader(self._dataset, self._beginning, at)
        block = reader.next_block()
        reader.fill(block)
        # The next block is read sample by sample as this one is returned, so that no step waits for a whole block.
        upcoming = reader.next_block()
        reader.fill(upcoming, at.offset)
        offset = at.offset
        while True:
            order = list(range(len(block.rows)))
            if at.shuffle_samples is not None:
                # Seeding with a string gives the same order on every machine.
                random.Random(f"{at.seed} {block.epoch} {block.number}").shuffle(order)
            for index in range(offset, len(order)):
                reader.fill(upcoming, 1)
                position = replace(at, epoch=block.epoch, block=block.number, offset=index + 1, state=block.state)
                yield block.rows[order[index]], position
            reader.fill(upcoming)
            block, upcoming, offset = upcoming, reader.next_block(), 0


@dataclass
class _Block:
    """Consecutive samples of the stream; `state` is that of the stream before the first of them."""

    epoch: int
    number: int
    state: Mapping[str, Any]
    rows: list[Any]
    whole: bool = False


class _BlockReader:
    """Reads a stream block by block, without end. The last block of an epoch may be shorter, or empty."""

    def __init__(self, dataset: Any, beginning: Mapping[str, Any], start: StreamPosition) -> None:
        self._dataset, self._beginning = dataset, beginning
        self._shuffled = start.shuffle_samples is not None
        self._size = start.shuffle_samples or _BLOCK_SAMPLES
        self._next = (start.epoch, start.block, start.state)
        self._rows = self._open()

    def _open(self) -> Iterator[Any]:
        epoch, _, state = self._next
        # A stream of several files reads them in another order in every epoch.
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch if self._shuffled else 0)
        self._dataset.load_state_dict(copy.deepcopy(state))
        return iter(self._dataset)

    def next_block(self) -> _Block:
        """Begin the next block; the previous one must be whole."""
        return _Block(*self._next, rows=[])

    def fill(self, block: _Block, count: int | None = None) -> None:
        """Read `count` samples of a block, or all that are missing."""
        for _ in range(self._size if count is None else count):
            if block.whole:
                return
            row = next(self._rows, _END)
            if row is _END:
                if not block.rows and block.number == 0:
                    raise ValueError("the training data has no rows")
                self._next = (block.epoch + 1, 0, self._beginning)
                self._rows = self._open()
                block.whole = True
                return
            block.rows.append(row)
            if len(block.rows) == self._size:
                self._next = (block.epoch, block.number + 1, _copied(self._dataset.state_dict()))
                block.whole = True


class StreamDataLoader(DataLoader):  # type: ignore[type-arg]
    """A `DataLoader` over `StreamBatches`.

    Attributes:
        position: Position behind the batch that was drawn last.
        is_positioned: `start_at` was called.
    """

    def __init__(
        self, batches: StreamBatches, collate_fn: Callable[[list[Any]], Any], num_workers: int, **options: Any
    ) -> None:
        """Load batches, each made of a list of samples by `collate_fn`; of `num_workers`, at most one is used."""
        self._batches = batches
        self.position, self.is_positioned = batches.start, False
        self._num_dropped = 0
        # A stream has one order, so one worker reads it. The loader gets a generator of its own, because draws from the
        # global one would differ between a resumed and an uninterrupted run.
        super().__init__(
            batches,
            batch_size=None,
            collate_fn=functools.partial(_collated, collate_fn),
            num_workers=min(num_workers, 1),
            generator=torch.Generator().manual_seed(0),
            **options,
        )

    def start_at(self, position: StreamPosition) -> None:
        """Begin the next iteration at a position; see `StreamBatches.start_at`."""
        self._batches.start_at(position)
        self.position, self.is_positioned = position, True

    def drop_first(self, num_batches: int) -> None:
        """Pass over so many batches in the next iteration."""
        self._num_dropped = num_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        num_dropped, self._num_dropped = self._num_dropped, 0
        for number, (batch, position) in enumerate(super().__iter__()):
            self.position = position
            if number >= num_dropped:
                yield batch


def _collated(collate: Callable[[list[Any]], Any], item: tuple[list[Any], StreamPosition]) -> tuple[Any, Any]:
    return collate(item[0]), item[1]


def _copied(state: Any) -> dict[str, Any]:
    """Return a stream's state as JSON holds it."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        copied = {}
    if copied != state:
        raise CheckpointError(
            "the streamed data set's state_dict() cannot be written as JSON; it may hold numbers, strings, lists and "
            "dicts"
        )
    return copied


def is_seekable(dataset: Any) -> bool:
    """Return whether a data set has no length and can continue from a saved state."""
    return (
        isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    )


def beginning_of(dataset: Any) -> dict[str, Any]:
    """Return a stream's state before its first sample, even if it has been read from.

    Raises:
        CheckpointError: The stream is divided among the ranks already, or its library does not resume streams
            correctly.
    """
    if type(dataset).__module__.startswith("datasets."):
        version = Version(importlib.metadata.version("datasets"))
        # Tried with 4.7.0, 4.8.0, 4.8.5, 5.0.0, 5.1.0, 5.2.0: those without the fix continued elsewhere in the stream.
        if version < Version("4.8.5") or version.release[:2] == (5, 0):
            raise CheckpointError(
                f"datasets {version} does not resume a stream where it was; install datasets 4.8.5, or 5.1 or newer"
            )
    if getattr(dataset, "_distributed", None) is not None:
        raise CheckpointError(
            "the streamed data set was given through split_dataset_by_node; give it whole: each rank takes its share "
            "of every batch, so that the number of ranks may change"
        )
    if hasattr(dataset, "_prepare_ex_iterable_for_iteration"):
        # A data set of `datasets` has the state of the last sample that was read; a freshly prepared copy does not.
        dataset = copy.copy(dataset)
        dataset._prepare_ex_iterable_for_iteration()
    state: dict[str, Any] = dataset.state_dict()
    return state
