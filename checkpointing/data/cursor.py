"""The position in a DataLoader's order, for any sampler.

The order is the loader's own. A cursor counts the batches that training has used, and records what the order depended
on when the epoch began: the host's generators, the samplers' own generators, and their counters. A resumed process
restores those, has the sampler produce its indices again (no sample is loaded for them), compares a digest of them
with the recorded one, and continues behind the last batch that was used.

What a data set or a collate function draws while it makes a batch depends on the batch's number, see `generators`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from checkpointing.data.batch_digest import batch_digest
from checkpointing.data.dealing import Dealing, DealtBatchSampler, RecutBatchSampler, StepLayout
from checkpointing.data.generators import batch_seed
from checkpointing.data.iteration import ReplayedSampler, ReplayedStream, ResumedLoader, SamplerState
from checkpointing.data.position import EpochStart, OrderDigest, Position, check_order, ended_early
from checkpointing.errors import CheckpointError
from checkpointing.process import rng

# Batches of a stream that are compared when it is read again. One that is shuffled otherwise differs at once.
_NUM_COMPARED = 8
# Attribute of a loader that holds its cursor.
_CURSOR = "_checkpointing_cursor"


def state_name(rank: int, world_size: int) -> str:
    """Return the name of the checkpoint's file with a rank's data positions."""
    return f"data_state_{rank}.pth" if world_size > 1 else "data_state.pth"


class LoaderCursor:
    """The position of training in one loader's order. Attaching a cursor changes the loader in place.

    Attributes:
        loader: The loader that is followed.
        layout: How steps are divided now.
        epoch: Of the batches that are used now; set by `begin_epoch`.
        consumed: Batches of this epoch that training has used.
        is_stream: The data set has no length.
        skips_epoch: No batch of the resumed epoch is drawn.
        interleaves: The sampler was seen to draw from the host's generators in mid-epoch.
        watches_draws: The sampler may do so.
        other_ranks: Numbers of ranks when the checkpoint was made and now, where they differ; for messages.
    """

    def __init__(
        self,
        loader: Any,
        *,
        seed: int,
        rank: int,
        made_for: StepLayout | None = None,
        now: StepLayout | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        """Attach a cursor to a loader.

        Args:
            loader: A torch DataLoader, or accelerate's wrapper around one.
            seed: Of what is drawn while a batch is made.
            rank: Of this process; ranks draw differently.
            made_for: How steps were divided when the run began.
            now: How they are divided now; where this differs, each step keeps its samples.
            dealing: The loader's batches are those of all virtual ranks: which ones are this rank's.

        Raises:
            CheckpointError: The loader cannot be followed, or its order cannot be divided differently.
        """
        base = _torch_loader(loader)
        if base is None:
            raise CheckpointError(f"{type(loader).__name__} is not a torch DataLoader")
        if base.num_workers > 0 and not getattr(base, "in_order", True):
            raise CheckpointError(
                "in_order=False (dataloader_in_order of TrainingArguments) gives batches as the workers finish them, "
                "in an order that cannot be resumed; leave it out"
            )
        self.loader, self._base, self._seed, self._rank = loader, base, seed, 0 if dealing is not None else rank
        self._dealing = dealing
        self.layout = now or StepLayout(1, 1, 1)
        self.epoch, self.consumed, self.interleaves, self.skips_epoch = 0, 0, False, False
        self.other_ranks: tuple[int, int] | None = None
        self._over = self._is_awaited = False
        self._start: EpochStart | None = None
        self._digest = OrderDigest()
        self._resume_from: Position | None = None
        # The position whose order is being replayed, until the digests were compared.
        self._expected: Position | None = None
        self._samplers: SamplerState | None = None
        self._stream: ReplayedStream | None = None
        self._recut: RecutBatchSampler | None = None
        self.watches_draws = False
        self.is_stream = isinstance(base.dataset, IterableDataset)
        loader.__dict__[_CURSOR] = self
        if self.is_stream:
            self._stream = ReplayedStream(base, self.take_iteration, self._take_position)
            return
        slot = "batch_sampler" if base.batch_sampler is not None else "sampler"
        inner: Any = getattr(base, slot)
        if dealing is not None:
            inner = DealtBatchSampler(inner, dealing)
        elif made_for is not None and now is not None and made_for != now:
            inner = self._recut = RecutBatchSampler(inner, made_for, now, rank)
        self._samplers = SamplerState(inner)
        self.watches_draws = self._samplers.may_draw_globally
        # DataLoader refuses to have its sampler replaced, as its iterators may hold the old one; there are none yet.
        base.__dict__[slot] = ReplayedSampler(inner, self)

    @classmethod
    def of(cls, loader: Any) -> LoaderCursor | None:
        """Return the cursor that follows a loader, if any."""
        found = getattr(loader, "__dict__", {}).get(_CURSOR)
        return found if isinstance(found, cls) else None

    @property
    def name(self) -> str:
        """Class name of what gives the order, for messages."""
        return self._samplers.name if self._samplers is not None else type(self._base.dataset).__name__

    @property
    def drawn_from(self) -> list[object]:
        """The objects whose generators decide on order and samples: their state is a part of the position."""
        base = self._base
        parts = [base.batch_sampler, base.sampler, base.generator, base.dataset, base.collate_fn]
        return [part for part in parts if part is not None]

    # -- called by the training loop -----------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Announce that the next batches are of this epoch, from its beginning unless it is the resumed one."""
        self.epoch, self._over, self.skips_epoch = epoch, False, False
        self._is_awaited, self._start = True, None
        if self.is_stream:
            self._digest.reset()
        self.consumed = self._resume_from.consumed if self._resume_from is not None else 0

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of everything in the loader that has it, then `begin_epoch`."""
        base = self._base
        inner = getattr(base, "batch_sampler", None)
        done: list[Any] = []
        for part in (self.loader, inner, getattr(inner, "sampler", None), getattr(base, "sampler", None), base.dataset):
            part = getattr(part, "_inner", part)
            if part is not None and hasattr(part, "set_epoch") and not any(part is other for other in done):
                done.append(part)
                part.set_epoch(epoch)
        self.begin_epoch(epoch)

    def iterate(self) -> Iterator[Any]:
        """Return the loader's batches from the position on.

        A stream is read up to the position, unless its loader can be set to it.
        """
        position = self._resume_from
        state = position.loader if position is not None and hasattr(self._base, "load_state_dict") else None
        if self.is_stream and state is not None:
            self.loader.load_state_dict(state)
        # At once, since it restores what the stream begins with.
        iterator = iter(self.loader)
        return iterator if state is not None or not self.is_stream else self._read_again(iterator, position)

    def _read_again(self, iterator: Iterator[Any], position: Position | None) -> Iterator[Any]:
        """Return a stream's batches from a position on.

        Raises:
            CheckpointError: Those before it are others than the first batches that the checkpoint recorded.
        """
        number, consumed = 0, position.consumed if position is not None else 0
        for number, batch in enumerate(iterator, 1):
            if number <= _NUM_COMPARED:
                self._digest.add(number - 1, batch_digest(batch))
            if position is not None and number == self._num_compared(consumed):
                check_order(replace(position, consumed=number), self._digest.newest, self.name, self.other_ranks)
            if number > consumed:
                yield batch
        if number < consumed:
            raise ended_early(self.name, number, consumed)

    def _num_compared(self, consumed: int) -> int:
        """Return how many of so many batches are in the digest."""
        return min(consumed, _NUM_COMPARED) if self.is_stream else consumed

    def consume(self, num_batches: int) -> None:
        """Count batches that training has used."""
        self.consumed += num_batches

    def is_filler(self, number: int) -> bool:
        """Return whether batch `number` of this epoch has only a sample of another rank, and must not count."""
        return self._recut is not None and number in self._recut.fillers

    def end_epoch(self) -> None:
        """Record that the epoch is over: nothing of it is repeated by a resumed run."""
        self._over = True

    # -- saving and resuming -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position behind the batches used so far, for `resume`; made of plain values and tensors."""
        samplers, stream = self._samplers, self._stream
        return Position(
            self.epoch,
            self.consumed,
            self._over,
            self._digest.after(self._num_compared(self.consumed)),
            self.interleaves,
            stream.start if stream is not None else self._start,
            samplers.generators() if samplers is not None else {},
            samplers.counters() if samplers is not None else {},
            self.layout,
            self._seed,
            self.loader.state_dict() if self.is_stream and hasattr(self._base, "state_dict") else None,
            stream.generators if stream is not None else None,
        ).to_state()

    def resume(self, state: Mapping[str, Any], steps_per_epoch: int | None = None) -> tuple[int, int]:
        """Continue from a `state`.

        Args:
            state: As a checkpoint holds it.
            steps_per_epoch: Optimizer steps in an epoch; needed where steps may have been divided differently.

        Returns:
            The epoch, and how many of its batches training has used.

        Raises:
            KeyError: A part of the state is missing.
            TypeError: A part has another type.
            ValueError: A part has a value that is not possible.
        """
        position = Position.from_state(state)
        if steps_per_epoch is not None:
            position = position.recut(self.layout, steps_per_epoch)
        self.interleaves = position.interleaves
        self._seed = position.seed if position.seed is not None else self._seed
        if position.over:
            self._restore_samplers(position.generators, position.counters)
            return position.epoch + 1, 0
        if position.consumed or position.start is not None:
            self._resume_from = position
        self.epoch, self.consumed = position.epoch, position.consumed
        return position.epoch, position.consumed

    def skip(self, num_batches: int) -> None:
        """Begin the next iteration behind so many batches of this rank, of which nothing else is known."""
        if self._dealing is not None:
            num_batches = self._dealing.count_of_all(num_batches)
        if num_batches:
            self._resume_from = Position(self.epoch, num_batches)
            self.consumed = num_batches

    def skip_epoch(self) -> None:
        """Draw no batch of the resumed epoch, and leave the samplers as its last batch did."""
        self.skips_epoch = True
        if (position := self._take_position()) is not None:
            self._restore_samplers(position.generators, position.counters)

    def remaining(self) -> Any:
        """Return the loader for the resumed epoch; a stream is read up to the position first."""
        return ResumedLoader(self.loader, self.iterate) if self.is_stream else self.loader

    @property
    def resumes_mid_epoch(self) -> bool:
        """Whether the next iteration begins behind the epoch's first batch."""
        return self._resume_from is not None

    # -- called by the loader's iterators, see `iteration` -------------------------------------------------------

    def take_iteration(self) -> bool:
        """Return whether the iteration that begins now trains: the first one after each `begin_epoch`."""
        awaited, self._is_awaited = self._is_awaited, False
        return awaited

    def begin_drawing(self) -> int:
        """Restore what the order depends on; return the number of batches to pass over."""
        self._digest.reset()
        position = self._expected = self._take_position()
        assert self._samplers is not None
        if position is not None and position.start is not None:
            self._start = position.start
            rng.set_host_state(dict(self._start.host))
            self._restore_samplers(self._start.generators, self._start.counters)
        else:
            self._start = EpochStart(rng.host_state(), self._samplers.generators(), self._samplers.counters())
        return position.consumed if position is not None else 0

    def drawn(self, number: int, index: Any) -> None:
        """Record that batch `number` of this iteration was drawn."""
        self._digest.add(number, index)

    def check_replayed(self) -> None:
        """Check that the batches passed over are those of the checkpoint.

        Raises:
            CheckpointError: They are others.
        """
        position, self._expected = self._expected, None
        # A sampler that interleaves was reported when that was noticed.
        if position is not None and not self.interleaves:
            check_order(position, self._digest.newest, self.name, self.other_ranks)

    def is_ours(self, number: int) -> bool:
        """Return whether a batch is dealt to this rank."""
        return self._dealing is None or self._dealing.is_ours(number)

    def seed_of(self, number: int) -> int:
        """Return the seed of what is drawn while batch `number` of this epoch is made."""
        return batch_seed(self._seed, self.epoch, number, self._rank)

    def _take_position(self) -> Position | None:
        position, self._resume_from = self._resume_from, None
        return position

    def _restore_samplers(self, generators: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        if self._samplers is not None:
            self._samplers.restore(generators, counters)


def _torch_loader(loader: Any) -> DataLoader[Any] | None:
    """Return the torch DataLoader that a loader is, or wraps."""
    # accelerate's wrappers pretend to be instances of what they wrap.
    base = loader.__dict__.get("base_dataloader", loader) if hasattr(loader, "__dict__") else loader
    return base if isinstance(base, DataLoader) else None
