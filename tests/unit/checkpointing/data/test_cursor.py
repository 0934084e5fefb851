"""The position in a loader's order, replayed and compared."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from checkpointing.data.cursor import LoaderCursor
from checkpointing.errors import CheckpointError
from checkpointing.process import rng


class Rows(Dataset[Any]):
    """Each row draws from every kind of generator."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(())), float(self.own.random())


class Shuffled(Sampler[int]):
    """Keeps a generator and a counter of its own, and draws from a global one when an epoch begins."""

    def __init__(self) -> None:
        self.generator, self.calls = torch.Generator().manual_seed(5), 0

    def __len__(self) -> int:
        return 17

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        random.seed(random.random() + self.calls)
        order = torch.randperm(17, generator=self.generator).tolist()
        random.shuffle(order)
        return iter(order)


class Lazy(Sampler[int]):
    """Makes its generators when the first epoch begins, and draws from them in every epoch."""

    def __init__(self) -> None:
        self.torch: Any = None
        self.numpy: Any = None
        self.old_numpy: Any = None
        self.python: Any = None

    def __len__(self) -> int:
        return 17

    def __iter__(self) -> Iterator[int]:
        if self.torch is None:
            self.torch = torch.Generator().manual_seed(5)
            self.numpy = np.random.Generator(np.random.Philox(5))
            self.old_numpy = np.random.RandomState(5)
            self.python = random.Random(5)
        order = torch.randperm(17, generator=self.torch).numpy()
        self.numpy.shuffle(order)
        self.old_numpy.shuffle(order)
        order = order.tolist()
        self.python.shuffle(order)
        return iter(order)


class Interleaved(Sampler[int]):
    """Draws each index from a global generator as it is asked for."""

    def __len__(self) -> int:
        return 17

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(17, ())) for _ in range(17))


def seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def readable(value: Any) -> Any:
    """Tensors as lists, so that trees of them can be compared."""
    if isinstance(value, dict):
        return {name: readable(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def loader(sampler: Any, num_workers: int, persistent: bool = False) -> DataLoader[Any]:
    return DataLoader(
        Rows(), batch_size=3, sampler=sampler, num_workers=num_workers, persistent_workers=persistent, collate_fn=list
    )


def train(loader: Any, start: tuple[dict[str, Any], dict[str, Any]] | None, until: int, save_at: int) -> Any:
    """A loop that draws as dropout does; returns batches, draws, and the state after `save_at` and `until` batches."""
    cursor, seen, draws, saved = LoaderCursor(loader, seed=9, rank=0), [], [], None
    at_end: Any = None
    epoch, num = 0, 0
    if start is not None:
        rng.set_host_state(start[1])
        epoch, _ = cursor.resume(start[0])
        num = save_at
    while num < until:
        cursor.set_epoch(epoch)
        training = rng.host_state() if cursor.resumes_mid_epoch else None
        for batch in cursor.iterate():
            if training is not None:
                rng.set_host_state(training)
                training = None
            cursor.consume(1)
            num += 1
            seen.append(batch)
            draws.append((random.random(), float(torch.rand(()))))
            if num == save_at:
                saved = (cursor.state(), rng.host_state())
            if num == until:
                at_end = cursor.state()
                break
        if training is not None:
            rng.set_host_state(training)
        epoch += 1
    return seen, draws, saved, at_end


def test_an_epoch_that_has_only_been_drawn_is_resumed_in_its_order() -> None:
    """As where a trainer saves once it has the first batch of an epoch, before it has used it."""
    seeded()
    shuffled = DataLoader(Rows(), batch_size=3, shuffle=True, collate_fn=list)
    cursor = LoaderCursor(shuffled, seed=9, rank=0)
    cursor.begin_epoch(2)
    # Nothing is drawn yet, and there is no order to keep.
    assert cursor.state()["start"] in (None, {})
    batches = cursor.iterate()
    drawn = [next(batches)]
    position = cursor.state()
    drawn += batches
    torch.manual_seed(5)
    again = LoaderCursor(DataLoader(Rows(), batch_size=3, shuffle=True, collate_fn=list), seed=9, rank=0)
    assert again.resume(position) == (2, 0)
    again.begin_epoch(2)
    assert list(again.iterate()) == drawn


# Workers change what is drawn ahead, not where an order can be cut: one position by default.
@pytest.mark.parametrize("kind", ["random", "weighted", "own", "lazy", "seedable"])
@pytest.mark.parametrize(
    ("num_workers", "save_at"),
    [
        *((0, save_at) for save_at in (1, 4, 6, 7, 11)),
        pytest.param(2, 6, marks=pytest.mark.process),
        *(pytest.param(2, save_at, marks=pytest.mark.soak) for save_at in (1, 4, 7, 11)),
    ],
)
def test_any_sampler_is_resumed_with_what_its_batches_drew(kind: str, num_workers: int, save_at: int) -> None:
    def make() -> DataLoader[Any]:
        samplers: dict[str, Any] = {
            "random": lambda: RandomSampler(range(17)),
            "weighted": lambda: WeightedRandomSampler([1.0 + n for n in range(17)], 17),
            "own": Shuffled,
            "lazy": Lazy,
            "seedable": lambda: SeedableRandomSampler(range(17)),
        }
        return loader(samplers[kind](), num_workers)

    seeded()
    whole, draws, saved, at_end = train(make(), None, 14, save_at)
    seeded()  # a new process
    rest, rest_draws, _, rest_at_end = train(make(), saved, 14, save_at)
    assert rest == whole[save_at:]
    assert rest_draws == draws[save_at:]
    assert readable(rest_at_end) == readable(at_end)


def test_a_batch_draws_the_same_with_any_number_of_workers() -> None:
    seen = []
    for num_workers, persistent in ((0, False), (1, False), (2, True)):
        seeded()
        data: Any = loader(range(17), num_workers, persistent)
        seen.append(train(data, None, 12, 1)[0])
        if persistent:
            # Left to the garbage collector, which closes their queues first, workers are waited for in vain, 5 s each.
            data._iterator._shutdown_workers()
    assert seen[0] == seen[1] == seen[2]
    # Not the same in another epoch.
    assert seen[0][0] != seen[0][6]


def test_order_and_training_are_those_of_the_loader_alone() -> None:
    seeded()
    # Rows that draw nothing: then nothing at all may differ.
    rows: Any = list(range(17))
    quiet: Any = DataLoader(rows, batch_size=3, sampler=RandomSampler(range(17)), collate_fn=list)
    stock, stock_draws = [], []
    for _ in range(2):
        for batch in quiet:
            stock.append(batch)
            stock_draws.append((random.random(), float(torch.rand(()))))
    seeded()
    quiet = DataLoader(rows, batch_size=3, sampler=RandomSampler(range(17)), collate_fn=list)
    seen, draws, _, _ = train(quiet, None, 12, 1)
    assert (seen, draws) == (stock, stock_draws)


def test_an_order_that_has_changed_is_refused_by_name() -> None:
    seeded()
    *_, saved, _ = train(loader(Shuffled(), 0), None, 12, 4)
    seeded()
    sampler = Shuffled()
    sampler.generator.manual_seed(6)
    saved[0]["start"]["owned"] = {}
    with pytest.raises(
        CheckpointError, match=r"Shuffled gives other samples than before: the first 4 batches of epoch 0"
    ):
        train(loader(sampler, 0), saved, 12, 4)


def test_an_order_that_is_divided_by_ranks_names_them() -> None:
    rows: Any = range(17)
    *_, saved, _ = train(loader(DistributedSampler(rows, 2, 0), 0), None, 12, 4)
    again = loader(DistributedSampler(rows, 3, 0), 0)
    cursor = LoaderCursor(again, seed=9, rank=0)
    cursor.other_ranks = (2, 3)
    epoch, _ = cursor.resume(saved[0])
    cursor.set_epoch(epoch)
    with pytest.raises(CheckpointError, match=r"DistributedSampler .* the number of ranks, which was 2 and is 3"):
        list(cursor.iterate())


def test_an_order_that_has_become_shorter_is_refused() -> None:
    seeded()
    *_, saved, _ = train(loader(range(17), 0), None, 12, 5)
    with pytest.raises(CheckpointError, match=r"ended after 2 batches of an epoch; the checkpoint was made after 5"):
        train(loader(range(6), 0), saved, 12, 5)


def test_an_order_that_is_drawn_on_the_way_is_named(caplog: pytest.LogCaptureFixture) -> None:
    seeded()
    followed = loader(Interleaved(), 0)
    cursor = LoaderCursor(followed, seed=0, rank=0)
    cursor.set_epoch(0)
    list(cursor.iterate())
    assert cursor.interleaves
    assert len(caplog.records) == 1 and "Interleaved draws indices from the global random" in caplog.text


def test_a_look_into_the_data_beside_training_moves_no_position() -> None:
    seeded()
    quiet: Any = DataLoader(list(range(17)), batch_size=3, collate_fn=list)  # type: ignore[arg-type]
    cursor = LoaderCursor(quiet, seed=0, rank=0)
    assert len(list(quiet)) == 6
    cursor.set_epoch(0)
    training = cursor.iterate()
    for _ in range(3):
        next(training)
        cursor.consume(1)
    expected = cursor.state()
    assert next(iter(quiet)) == [0, 1, 2]
    assert repr(cursor.state()) == repr(expected) and expected["order"] is not None
    again: Any = DataLoader(list(range(17)), batch_size=3, collate_fn=list)  # type: ignore[arg-type]
    resumed = LoaderCursor(again, seed=0, rank=0)
    resumed.resume(expected)
    assert next(iter(again)) == [0, 1, 2]
    resumed.set_epoch(0)
    assert next(resumed.iterate()) == [9, 10, 11]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((number, random.random(), float(torch.rand(()))) for number in range(17))


@pytest.mark.parametrize("save_at", [1, 5, 6, 8])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_read_up_to_the_position(num_workers: int, save_at: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=3, num_workers=num_workers, collate_fn=list)

    seeded()
    whole, draws, saved, _ = train(make(), None, 12, save_at)
    seeded()
    rest, rest_draws, _, _ = train(make(), saved, 12, save_at)
    assert rest == whole[save_at:]
    assert rest_draws == draws[save_at:]


def test_batches_in_the_order_in_which_workers_finish_them_are_refused() -> None:
    LoaderCursor(DataLoader(Rows(), in_order=False), seed=9, rank=0)
    with pytest.raises(CheckpointError, match="in_order=False"):
        LoaderCursor(DataLoader(Rows(), num_workers=2, in_order=False), seed=9, rank=0)


class Ordered(IterableDataset[Any]):
    """Rows with labels, in an order of its own; what is drawn for a row is another each time."""

    def __init__(self, order: Callable[[int], list[int]], length: int = 40) -> None:
        self.order, self.length = order, length

    def __iter__(self) -> Iterator[Any]:
        return ((row, os.urandom(1)[0] / 256) for row in self.order(self.length))


def seeded_order(length: int) -> list[int]:
    return random.Random(3).sample(range(length), length)


def unseeded_order(length: int) -> list[int]:
    return random.SystemRandom().sample(range(length), length)


def read(data: Ordered, count: int, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Labels of some batches, and the position behind them."""
    cursor = LoaderCursor(DataLoader(data, batch_size=2), seed=9, rank=0)
    cursor.set_epoch(cursor.resume(state)[0] if state is not None else 0)
    found = []
    for labels, _ in itertools.islice(cursor.iterate(), count):
        cursor.consume(1)
        found.append(labels.tolist())
    return found, cursor.state()


@pytest.mark.parametrize("consumed", [1, 3, 8, 12])
def test_a_stream_whose_order_has_no_seed_is_refused_when_it_is_read_again(consumed: int) -> None:
    """Samples were lost and repeated, silently. What was drawn for each sample may be another."""
    _, state = read(Ordered(unseeded_order), consumed)
    with pytest.raises(CheckpointError, match=r"Ordered gives other samples .* without a seed .*PYTHONHASHSEED"):
        read(Ordered(unseeded_order), 1, state)
    whole, _ = read(Ordered(seeded_order), 20)
    _, state = read(Ordered(seeded_order), consumed)
    again, later = read(Ordered(seeded_order), 2, state)
    assert again == whole[consumed : consumed + 2]
    # Once more, from what the resumed run has saved.
    assert read(Ordered(seeded_order), 2, later)[0] == whole[consumed + 2 : consumed + 4]


def test_the_digests_of_a_stream_are_those_of_its_epoch() -> None:
    """A trainer reads later epochs without the cursor."""
    _, state = read(Ordered(seeded_order), 3)
    cursor = LoaderCursor(DataLoader(Ordered(seeded_order), batch_size=2), seed=9, rank=0)
    cursor.set_epoch(cursor.resume(state)[0])
    list(cursor.iterate())
    cursor.set_epoch(1)
    cursor.consume(2)
    assert cursor.state()["order"] is None


def test_a_stream_that_has_become_shorter_is_refused() -> None:
    _, state = read(Ordered(seeded_order), 12)
    cut = Ordered(lambda _: seeded_order(40)[:20])
    with pytest.raises(CheckpointError, match=r"Ordered ended after 10 batches of an epoch; .* after 12"):
        read(cut, 1, state)
