"""Orders of the data: samplers, loaders, streams and collators of the user's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from compatibility import tiny
from compatibility.cases_trainer import trainer
from compatibility.ranks import Run
from compatibility.table import case, differs, refused
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from transformers import DataCollatorForLanguageModeling, Trainer


class _Stream(IterableDataset[Any]):
    """Has no state."""

    def __init__(self, count: int = tiny.NUM_ROWS) -> None:
        self.rows = tiny.rows(count)

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


class _StatefulStream(_Stream):
    """Knows its position."""

    def __init__(self, count: int = tiny.NUM_ROWS) -> None:
        super().__init__(count)
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < len(self.rows):
            self._next += 1
            yield self.rows[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class _Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        yield from range(self._size - 1, -1, -1)


class _ByEpoch(_Backwards):
    """Another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 + self.epoch)
        yield from torch.randperm(self._size, generator=generator).tolist()


class _Weighted(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        weights = [float(number + 1) for number in range(len(self.train_dataset))]
        return WeightedRandomSampler(weights, len(self.train_dataset), generator=generator)


class _WeightedGlobally(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([float(number + 1) for number in range(tiny.NUM_ROWS)], tiny.NUM_ROWS)


class _OwnSampler(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return _Backwards(len(self.train_dataset))


class _EpochSampler(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return _ByEpoch(len(self.train_dataset))


class _OwnLoader(Trainer):
    """Prepared, as the Trainer's own is."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=2, sampler=_Backwards(14), collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class _UnpreparedLoader(Trainer):
    """The same batches on all ranks."""

    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            self.train_dataset, batch_size=2, shuffle=True, collate_fn=self.data_collator, generator=generator
        )


class _OwnBatchSampler(Trainer):
    def get_train_dataloader(self) -> Any:
        sampler = BatchSampler(_ByEpoch(14), 2, drop_last=False)
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        )


class _ShuffledLoader(Trainer):
    """A plain loader with shuffle=True, whose order comes from the global generator."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=self.data_collator)
        )


def _own(name: str, cls: Any, **options: Any) -> None:
    @case(f"samplers/{name}", stock=True)
    def _body(run: Run) -> None:
        run.train(trainer(run, cls, **options))


_own("weighted, own generator", _Weighted)
_own("weighted, global generator", _WeightedGlobally)
_own("own sampler", _OwnSampler)
_own("own sampler with set_epoch", _EpochSampler)
_own("own sampler, workers", _EpochSampler, dataloader_num_workers=1)
_own("own loader", _OwnLoader)
_own("own loader, not prepared", _UnpreparedLoader)
_own("own batch sampler", _OwnBatchSampler)
_own("own shuffled loader", _ShuffledLoader)


# -- streams --------------------------------------------------------------------------------------------------------


@case("streams/IterableDataset", stock=True)
def _plain(run: Run) -> None:
    run.train(trainer(run, dataset=_Stream(60)))


@case("streams/IterableDataset of several epochs", stock=True)
def _plain_epochs(run: Run) -> None:
    run.train(trainer(run, dataset=_Stream(16)))


@case("streams/IterableDataset with state", stock=True)
def _stateful(run: Run) -> None:
    run.train(trainer(run, dataset=_StatefulStream(60)))


@case("streams/IterableDataset with state, several epochs", stock=True)
def _stateful_epochs(run: Run) -> None:
    run.train(trainer(run, dataset=_StatefulStream(16)))


def _streamed(count: int = 60, shards: int = 2) -> Any:
    return datasets.Dataset.from_list(tiny.rows(count)).to_iterable_dataset(num_shards=shards)


@case("streams/datasets streaming", stock=True)
def _datasets(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed()))


@case("streams/datasets streaming, one process", stock=True, ranks=1)
def _datasets_one(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed()))


@case("streams/datasets streaming, workers", stock=True)
def _datasets_workers(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed(), dataloader_num_workers=1))


@case("streams/datasets streaming, several epochs", stock=True)
def _datasets_epochs(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed(16)))


@case("streams/datasets streaming, accumulation", stock=True)
def _datasets_accumulation(run: Run) -> None:
    run.train(
        trainer(run, dataset=_streamed(), gradient_accumulation_steps=2, per_device_train_batch_size=1),
    )


@case("streams/interleave", stock=True)
def _interleave(run: Run) -> None:
    both = datasets.interleave_datasets([_streamed(40), _streamed(50)], probabilities=[0.3, 0.7], seed=3)
    run.train(trainer(run, dataset=both))


@case("streams/shuffle buffer", stock=True)
def _shuffled(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed().shuffle(seed=4, buffer_size=10)))


@case("streams/shuffle_samples")
def _shuffle_samples(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed()), seekable_stream=True, shuffle_samples=10)


@case("streams/seekable_stream")
def _seekable(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed()), seekable_stream=True)


@case("streams/seekable_stream of several epochs, workers")
def _seekable_epochs(run: Run) -> None:
    run.train(trainer(run, dataset=_streamed(16), dataloader_num_workers=1), seekable_stream=True)


@case("streams/map and filter", stock=True)
def _mapped(run: Run) -> None:
    stream = _streamed(80).map(lambda row: {"labels": row["labels"][::-1]})
    run.train(trainer(run, dataset=stream.filter(lambda row: row["input_ids"][0] % 5 != 0)))


def _split_by_node(run: Run) -> Any:
    stream = split_dataset_by_node(_streamed(), run.rank, run.world_size)
    return trainer(run, dataset=stream, accelerator_config={"dispatch_batches": False})


@case("streams/split_dataset_by_node", stock=True)
def _split(run: Run) -> None:
    run.train(_split_by_node(run))


@case("streams/split_dataset_by_node, seekable_stream", verdict=refused("split_dataset_by_node; give it whole"))
def _split_seekable(run: Run) -> None:
    run.train(_split_by_node(run), seekable_stream=True)


# -- randomness where samples are read --------------------------------------------------------------------------------


# The same samples in the same order, with other random numbers; nothing may differ after the kill.
_SEEDED = differs(
    "random numbers for a batch are seeded by its position, so that a restarted run draws the same ones; without "
    "`resilient` they depend on what was drawn before",
    part=r"^changed by resilient: batch of stage 0, step 0000 \(rank 0\) differs[^;]*$",
)


def _masked(run: Run, **options: Any) -> Any:
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=True, mlm_probability=0.3)
    dataset = tiny.Rows()
    dataset.rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in dataset.rows]
    return trainer(run, model=tiny.bert(), data_collator=collator, dataset=dataset, **options)


@case("randomness/masked language modelling", stock=True, verdict=_SEEDED)
def _mlm(run: Run) -> None:
    run.train(_masked(run))


@case("randomness/masked language modelling, workers", stock=True, verdict=_SEEDED)
def _mlm_workers(run: Run) -> None:
    run.train(_masked(run, dataloader_num_workers=2))


@case("randomness/masked language modelling, persistent workers", stock=True, verdict=_SEEDED)
def _mlm_persistent(run: Run) -> None:
    run.train(_masked(run, dataloader_num_workers=2, dataloader_persistent_workers=True))


class _Augmented(tiny.Rows):
    """Draws from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        row = dict(super().__getitem__(index))
        drawn = [random.randrange(6, 250), int(np.random.randint(6, 250)), int(torch.randint(6, 250, ()))]
        return {**row, "input_ids": [*drawn, *row["input_ids"][3:]]}


@case("randomness/augmentation", stock=True, verdict=_SEEDED)
def _augmented(run: Run) -> None:
    run.train(trainer(run, dataset=_Augmented()))


@case("randomness/augmentation, workers", stock=True, verdict=_SEEDED)
def _augmented_workers(run: Run) -> None:
    run.train(trainer(run, dataset=_Augmented(), dataloader_num_workers=1))


@case("randomness/set_transform", stock=True, verdict=_SEEDED)
def _transform(run: Run) -> None:
    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        noise = [[int(torch.randint(6, 250, ())), *ids[1:]] for ids in batch["input_ids"]]
        return {**batch, "input_ids": noise}

    dataset = tiny.dataset()
    dataset.set_transform(noisy)
    run.train(trainer(run, dataset=dataset, dataloader_num_workers=1, remove_unused_columns=False))
