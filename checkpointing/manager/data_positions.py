"""The positions in the data loaders that training draws from: saved with each step, and resumed from."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from checkpointing.data.cursor import LoaderCursor, state_name
from checkpointing.data.dealing import Dealing, StepLayout
from checkpointing.data.draws import Draws
from checkpointing.data.position import Position
from checkpointing.errors import CheckpointError
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.torch_files import torch_bytes
from checkpointing.host.environment import rank_settings
from checkpointing.host.failpoints import failpoint
from checkpointing.process import rng
from checkpointing.process.ranks import Ranks


def resume_at(cursor: LoaderCursor, position: Mapping[str, Any]) -> int:
    """Have a loader continue from a checkpoint's position; returns the epoch.

    Raises:
        CheckpointError: The position cannot be parsed.
    """
    try:
        epoch, _ = cursor.resume(position)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's position in {cursor.name} cannot be parsed: {error}; resume from another step"
        ) from None
    return epoch


def check_one_loader(loader: Any) -> None:
    """Check that this may be a loader, whose position can be followed.

    Raises:
        TypeError: It is several loaders, or an iterator.
    """
    if isinstance(loader, (list, tuple, Mapping, Iterator)):
        raise TypeError(
            f"one DataLoader is followed at a time, not a {type(loader).__name__}: call manager.batches once for each "
            "loader, in the same order at every start, and combine what it returns, for example "
            "zip(manager.batches(first), manager.batches(second)). Of an iterator, give the loader itself"
        )


class DataPositions:
    """The loaders of one rank, in the order in which they were given.

    Args:
        ranks: This rank among all.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._followed: list[Draws] = []
        self._restored: list[Any] = []
        self._restored_ranks = ranks.world_size
        # Which this rank is of those that draw different samples; and whether it saves for those that draw the same.
        self._place, self._saves = (ranks.rank, ranks.world_size), True

    def follow(self, cursor: LoaderCursor, group_size: int = 1) -> None:
        """Have the position of a loader saved that the caller drives.

        Args:
            cursor: Of the loader.
            group_size: Number of ranks, next to each other, that draw the same samples: the first one saves.
        """
        self._followed.append(Draws(cursor))
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self._place, self._saves = (rank // group_size, world_size // group_size), rank % group_size == 0

    @property
    def cursors(self) -> list[LoaderCursor]:
        """The loaders that are followed."""
        return [draws.cursor for draws in self._followed]

    def forget(self) -> None:
        """Stop following all loaders."""
        self._followed.clear()

    def end_of_step(self, step: int) -> None:
        """Note that a step has ended: what is drawn from now on belongs to the next one.

        Raises:
            CheckpointError: How many batches of a loader are in flight cannot be known.
        """
        for draws in self._followed:
            draws.end_of_step(step)

    def files(self, step: int) -> dict[str, Callable[[], bytes]]:
        """Return this rank's file with all positions behind a step; empty where no loader is followed."""
        if not self._followed:
            return {}
        # Called by all, since a cursor forgets what it has been asked for.
        positions = [draws.state(step) for draws in self._followed]
        return {state_name(*self._place): functools.partial(torch_bytes, positions)} if self._saves else {}

    def read(self, point: LoadedCheckpoint) -> list[Any]:
        """Return the positions that a checkpoint holds for this rank or, where it has none, for rank 0.

        Raises:
            InvalidCheckpoint: The file cannot be parsed.
        """
        names = (state_name(*self._place), state_name(0, 2), state_name(0, 1))
        name = next(filter(point.has, names), None)
        if name is None:
            return []
        with point.reading(name):
            found = point.torch_object(name)
            if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
                raise ValueError("not a list of positions")
            return found

    def restore(self, point: LoadedCheckpoint) -> None:
        """Have `batches` start from the positions in a checkpoint."""
        self._restored, self._restored_ranks = self.read(point), point.world_size

    def batches(self, loader: Any, ahead: int | None = None) -> Iterator[Any]:
        """Iterate over a loader without end, from the restored position; see `CheckpointManager.batches`.

        Raises:
            TypeError: It is several loaders, or an iterator.
            ValueError: `ahead` is not a count.
            CheckpointError: The loader is of an unknown kind; or, while iterating, the resumed order differs.
        """
        check_one_loader(loader)
        if ahead is not None and (type(ahead) is not int or ahead < 0):
            raise ValueError(f"ahead={ahead!r} is not a number of batches: give 0, 1, 2, …")
        cursor = LoaderCursor(loader, seed=torch.initial_seed(), rank=self._ranks.rank)
        if self._restored_ranks != self._ranks.world_size:
            cursor.other_ranks = (self._restored_ranks, self._ranks.world_size)
        restored = self._next_restored()
        draws = Draws(cursor, ahead, restored, warns=self._ranks.is_first)
        self._followed.append(draws)
        return (batch for (batch,) in self._iterate(draws, restored))

    def _next_restored(self) -> Any:
        """Return the restored position of the next loader that is given; None without one."""
        number = len(self._followed)
        return self._restored[number] if number < len(self._restored) else None

    def dealt(self, loader: Any, virtual_ranks: int) -> tuple[Dealing, Iterator[list[tuple[int, Any]]]]:
        """Iterate over the steps of a loader that virtual ranks share, without end, from the restored position.

        Args:
            loader: A plain DataLoader, the same on all ranks.
            virtual_ranks: Number of virtual ranks; 0 for that of the checkpoint, or else that of ranks.

        Returns:
            Which virtual ranks this rank computes; and for each step their numbers and micro-batches.

        Raises:
            TypeError: It is several loaders, or an iterator.
            CheckpointError: The checkpoint was made with another number of virtual ranks; there are more ranks; or the
                loader's order may depend on the number of ranks.
        """
        check_one_loader(loader)
        ranks, restored = self._ranks, self._next_restored()
        layout = Position.from_state(restored).layout if restored is not None else None
        before = layout.world_size if layout is not None else 0
        count = virtual_ranks or before or rank_settings().planned_ranks or ranks.world_size
        # An order that is drawn by other seeds would deal other samples to each rank.
        draws = hashlib.sha256(torch.random.get_rng_state().numpy().tobytes()).hexdigest()
        if len(set(ranks.gather((torch.initial_seed(), draws)))) > 1:
            raise CheckpointError(
                "virtual ranks need the same generators on all ranks, from which the order of samples is drawn: seed "
                "them alike (torch.manual_seed(seed), without the rank), and draw nothing on single ranks before"
            )
        if before and count != before:
            raise CheckpointError(
                f"the checkpoint was made with {before} virtual ranks, and now there are {count}: the run would end in "
                "other bits. Use the same number, or another folder"
            )
        dealing = Dealing(count, ranks.rank, ranks.world_size)
        layout = StepLayout(count, 1, 1)
        cursor = LoaderCursor(
            loader, seed=torch.initial_seed(), rank=ranks.rank, made_for=layout, now=layout, dealing=dealing
        )
        followed = Draws(cursor, restored=restored)
        self._followed.append(followed)
        steps = self._iterate(followed, restored, size=len(dealing.block), counted=count)
        return dealing, (list(zip(dealing.block, mine, strict=True)) for mine in steps)

    def _iterate(
        self, draws: Draws, position: Mapping[str, Any] | None, *, size: int = 1, counted: int = 1
    ) -> Iterator[list[Any]]:
        """Iterate over a loader without end, so many batches at a time, of which so many count as used."""
        cursor, epoch = draws.cursor, 0
        # A prefetcher may have begun further epochs before the position's was used.
        positions = [position, *position.get("later", ())] if position is not None else []
        while True:
            if positions:
                epoch = resume_at(cursor, positions.pop(0))
            cursor.set_epoch(epoch)
            # What the loader draws on its way to the position must not be taken from training.
            training = rng.state(self._ranks.world_size) if cursor.resumes_mid_epoch else None
            iterator = cursor.iterate()
            batches = list(itertools.islice(iterator, size))
            if training is not None:
                rng.set_state(training)
            elif not batches:
                raise ValueError(f"the loader of {cursor.name} has no batch")
            begins_epoch = True
            while batches:
                cursor.consume(counted)
                draws.drawn(begins_epoch=begins_epoch)
                yield batches
                draws.will_draw()
                begins_epoch = False
                batches = list(itertools.islice(iterator, size))
            failpoint("training.epoch")
            epoch += 1
