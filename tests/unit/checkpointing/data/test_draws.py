"""Batches that a script has drawn and its steps have not used are drawn again by a resumed run, and never skipped."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from checkpointing.data.draws import Lead
from checkpointing.errors import CheckpointError
from checkpointing.manager.data_positions import DataPositions
from checkpointing.process.ranks import Ranks

TOTAL = 11


class Stream(IterableDataset[Any]):
    """In another order in each epoch, drawn when it begins."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor(row),) for row in torch.randperm(10).tolist())


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True)


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=2)


def plain(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def prefetched(ahead: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A prefetcher as scripts have them: it draws when it is made, and once more whenever it is asked."""

    def wrap(batches: Iterator[Any]) -> Iterator[Any]:
        queue = list(itertools.islice(batches, ahead))
        while True:
            queue.append(next(batches))
            yield queue.pop(0)

    return wrap


def teed(batches: Iterator[Any]) -> Iterator[Any]:
    mine, _ = itertools.tee(batches)
    return (one for one, _ in itertools.pairwise(mine))


def looked_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    coming = next(batches)
    for following in batches:
        yield coming
        coming = following


class Loop:
    """A training whose draws are from the generators that orders are drawn from, too."""

    def __init__(self, make: Callable[[], Any], wrap: Any = plain, ahead: int | None = None, per_step: int = 1) -> None:
        self.make, self.wrap, self.ahead, self.per_step = make, wrap, ahead, per_step

    def run(self, saved: tuple[Any, torch.Tensor] | None = None, first: int = 0, total: int = TOTAL) -> Any:
        """Train; returns what each step has used, and what each would have saved."""
        torch.manual_seed(3)
        positions = DataPositions(Ranks())
        if saved is not None:
            positions._restored = saved[0]
            torch.random.set_rng_state(saved[1])
        batches, used, kept = self.wrap(positions.batches(self.make(), self.ahead)), [], []
        for step in range(first + 1, total + 1):
            used.append([next(batches)[0].tolist() for _ in range(self.per_step)] + [torch.rand(()).item()])
            positions.end_of_step(step)
            kept.append(([dict(draws.state(step)) for draws in positions._followed], torch.random.get_rng_state()))
        return used, kept


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize(
    ("wrap", "ahead"),
    [(plain, 0), (prefetched(1), 1), (prefetched(3), 3), (prefetched(7), 7), (teed, 1), (looked_ahead, 1)],
)
@pytest.mark.parametrize("make", [shuffled, stream])
def test_what_is_in_flight_is_drawn_again(make: Any, wrap: Any, ahead: int, per_step: int) -> None:
    """Each resume skipped as many batches as the script's prefetcher held, without reporting it."""
    loop = Loop(make, wrap, ahead, per_step)
    used, kept = loop.run()
    for step in range(1, TOTAL):
        again, kept_again = loop.run(kept[step - 1], step)
        assert again == used[step:], step
        # Once more, from what the resumed run has saved.
        assert loop.run(kept_again[0], step + 1, min(step + 2, TOTAL))[0] == used[step + 1 : step + 2], step


def test_a_loader_that_was_not_drawn_from_since_the_resume_keeps_its_position() -> None:
    """A second loader that is read every tenth step began from its start where a save came before."""
    kept = Loop(shuffled).run(total=3)[1]
    positions = DataPositions(Ranks())
    positions._restored = kept[-1][0]
    positions.batches(shuffled())
    positions.end_of_step(4)
    assert positions._followed[0].state(4)["consumed"] == kept[-1][0][0]["consumed"] == 3


def test_a_batch_that_is_drawn_after_the_last_step_is_not_skipped_by_a_longer_run() -> None:
    """`for number, batch in enumerate(batches): if number == total: break` draws one that no step uses."""
    positions = DataPositions(Ranks())
    torch.manual_seed(3)
    batches = positions.batches(shuffled())
    for _ in range(4):
        next(batches)
    positions.end_of_step(4)
    next(batches)
    (draws,) = positions._followed
    # A loop that saves before it calls `step` has used all.
    assert (draws.state(4)["consumed"], draws.state(5)["consumed"]) == (4, 5)


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([1, 1], 0),
        ([4, 4], 0),
        ([2, 1, 1], 1),
        ([5, 2, 2], 3),
        ([0, 3, 0, 0, 1, 0, 1], 2),
        ([1, 0, 0, 1], 0),
        ([1, 2], 0),
        ([4, 2, 4], 0),
        ([2, 1], None),
        ([0, 0, 0], None),
    ],
)
def test_a_lead_is_what_the_first_step_has_drawn_more(counts: list[int], found: int | None) -> None:
    lead = Lead()
    results = [lead.add(count) for count in counts]
    assert results == [None] * (len(counts) - 1) + [found]


@pytest.mark.parametrize(("wrap", "excess"), [(plain, 0), (prefetched(1), 1), (prefetched(4), 4), (teed, 1)])
@pytest.mark.parametrize("per_step", [1, 3])
def test_a_prefetcher_that_was_not_declared_is_named_once(
    wrap: Any, excess: int, per_step: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Loop(shuffled, wrap, per_step=per_step).run()
    assert len(caplog.records) == (1 if excess else 0)
    if excess:
        assert f"manager.batches(loader, ahead={excess})" in caplog.text


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_was_declared_is_not_reported(ahead: int, caplog: pytest.LogCaptureFixture) -> None:
    """A script may draw a batch at first only to look at its shape."""
    Loop(shuffled, prefetched(1), ahead).run()
    assert not caplog.records


def in_a_thread(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        found: list[Any] = []
        thread = threading.Thread(target=lambda into: into.append(next(batches)), args=(found,))
        thread.start()
        thread.join()
        yield found[0]


@pytest.mark.parametrize("ahead", [None, 1])
def test_draws_in_another_thread_are_refused_unless_none_is_in_flight(ahead: int | None) -> None:
    with pytest.raises(CheckpointError, match=r"drawn in another thread .*num_workers.*ahead=0"):
        Loop(shuffled, in_a_thread, ahead).run()
    assert Loop(shuffled, in_a_thread, 0).run() is not None


def test_more_in_flight_than_were_drawn_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"ahead=2\): only 1 of RandomSampler"):
        Loop(shuffled, plain, 2).run()


@pytest.mark.parametrize("ahead", [-1, True, "1"])
def test_a_lead_that_is_no_count_is_refused(ahead: Any) -> None:
    with pytest.raises(ValueError, match="is not a number of batches"):
        DataPositions(Ranks()).batches(shuffled(), ahead)
