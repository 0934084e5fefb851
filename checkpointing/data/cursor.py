"""The position in a DataLoader's order, for any sampler, and randomness that depends on it alone.

The order is the loader's own. A cursor counts the batches that training has consumed, and keeps what the order depended
on when the epoch began: the host's generators, the samplers' own generators, and their counters. A resumed process puts
those back, has the sampler give its indices again (no sample is loaded for them), compares a digest of them with the
recorded one, and continues behind the last batch that was consumed.

What a data set or a collate function draws while it makes a batch comes from generators that are seeded by the batch's
number, in the main process as in workers. So it neither depends on where a process began to read, nor takes draws away
from training.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from checkpointing.environment import ALLOW_CHANGES_ENV, rank_settings
from checkpointing.errors import CheckpointError
from checkpointing.rank import rng

logger = logging.getLogger("checkpointing")

_END = object()
# Levels of attributes that are searched for generators.
_DEEPEST = 2
# Two of its functions are not in its stubs.
_NUMPY: Any = np.random
_OWN_WORDS = np.random.MT19937()
# Where a loader keeps its cursor.
_CURSOR = "_checkpointing_cursor"
_SIMPLE = (int, float, str, bool, type(None))
# Rows of a data set that its fingerprint looks at.
_FINGERPRINT_ROWS = 16
# Packages whose samplers draw everything they need when an epoch begins, or from generators of their own.
_KNOWN_PACKAGES = ("torch.", "accelerate.", "transformers.", "trl.", "sentence_transformers.", "checkpointing.")


def state_name(rank: int, world_size: int) -> str:
    """The checkpoint's file with a rank's data position."""
    return f"data_state_{rank}.pth" if world_size > 1 else "data_state.pth"


@dataclass(frozen=True)
class Layout:
    """How an optimizer step's samples are divided.

    Attributes:
        world_size: ranks that share each step.
        batch_size: samples per micro-batch and rank.
        accumulation: micro-batches per step and rank.
    """

    world_size: int
    batch_size: int
    accumulation: int

    @property
    def samples_per_step(self) -> int:
        return self.world_size * self.batch_size * self.accumulation


class _Seeded:
    """An index with the seed of what is drawn while its batch is made."""

    seed: int


class _SeededList(_Seeded, list[Any]):
    pass


class _SeededTuple(_Seeded, tuple[Any, ...]):
    pass


class _SeededInt(_Seeded, int):
    pass


# What samplers give, by type. Keys of other types reach the data set as they are.
_SEEDED: dict[type, Any] = {list: _SeededList, tuple: _SeededTuple, int: _SeededInt}
_PLAIN: dict[type, Any] = {seeded: plain for plain, seeded in _SEEDED.items()}


def with_seed(index: Any, seed: int) -> Any:
    """The same index, carrying a seed to whatever process fetches it."""
    # A list's subclass is as good as a list: batch samplers return what they like.
    plain = list if isinstance(index, list) else type(index)
    if plain not in _SEEDED:
        return index
    seeded = _SEEDED[plain](index)
    seeded.seed = seed
    return seeded


@contextlib.contextmanager
def drawing_by(seed: int, *owners: object) -> Iterator[None]:
    """Seed the host's generators, and those that the owners hold as attributes; give the host's their state back."""
    python, cpu = random.getstate(), torch.random.get_rng_state()
    # Once for each batch: numpy's words are slow to copy back and forth, so its generator is exchanged for another one.
    # What that forgets is a second normal that was drawn already.
    words, theirs = np.random.get_state(legacy=False), _NUMPY.get_bit_generator()
    _NUMPY.set_bit_generator(_OWN_WORDS if theirs is not _OWN_WORDS else np.random.MT19937())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not `torch.manual_seed`, which would seed the devices as well.
    torch.default_generator.manual_seed(seed)
    for path, generator in generators_of(*owners):
        _reseed(generator, seed ^ int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest()))
    try:
        yield
    finally:
        random.setstate(python)
        torch.random.set_rng_state(cpu)
        _NUMPY.set_bit_generator(theirs)
        if words["has_gauss"]:
            np.random.set_state(words)


def _put_back(state: Mapping[str, Any]) -> None:
    """`rng.set_host_state` for what this process has taken itself: nothing to check."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])


_fetch_unseeded: Any = _MapDatasetFetcher.fetch


def _fetch(self: Any, index: Any) -> Any:
    if not isinstance(index, _Seeded):
        return _fetch_unseeded(self, index)
    with drawing_by(index.seed, self.dataset, self.collate_fn):
        return _fetch_unseeded(self, _PLAIN[type(index)](index))


# DataLoader offers no hook around the making of one batch. Indices that carry no seed are fetched as before. A worker
# process imports this module when it receives the first batch that carries one.
_MapDatasetFetcher.fetch = _fetch  # type: ignore[method-assign]


def generators_of(*owners: object) -> Iterator[tuple[str, Any]]:
    """Random number generators that objects hold as attributes, with the attribute's path; each object once."""
    # How deep each object was looked into.
    seen: dict[int, int] = {}

    def walk(owner: object, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if seen.get(id(owner), -1) >= depth:
            return
        is_new, seen[id(owner)] = id(owner) not in seen, depth
        if isinstance(owner, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            seen[id(owner)] = _DEEPEST
            if is_new:
                yield path, owner
        elif isinstance(owner, functools.partial):
            for number, value in enumerate([owner.func, *owner.args, *owner.keywords.values()]):
                yield from walk(value, f"{path}({number})", depth)
        elif depth and not isinstance(owner, (type, types.ModuleType, torch.Tensor, torch.nn.Module)):
            # A bound method's object, what a function closes over, or any other object's attributes.
            attributes: dict[str, Any] = dict(getattr(owner, "__dict__", {}))
            if isinstance(owner, types.MethodType):
                attributes = {"__self__": owner.__self__}
            elif isinstance(owner, types.FunctionType):
                cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
                attributes |= {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
            for name, value in list(attributes.items()):
                if not isinstance(value, _SIMPLE):
                    yield from walk(value, f"{path}.{name}", depth - 1)

    for number, owner in enumerate(owners):
        yield from walk(owner, str(number), _DEEPEST)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed % 2**32)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _without_arrays(generator.get_state())
    return generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state))
    else:
        generator.setstate(state)


def _new_generator(state: Any) -> Any:
    """A generator of the kind that a state is of, in that state.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: it is no generator's state.
    """
    if isinstance(state, torch.Tensor):
        generator: Any = torch.Generator()
    elif isinstance(state, Mapping):
        kinds = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
        generator = np.random.Generator({kind.__name__: kind for kind in kinds}[state["bit_generator"]]())
    else:
        generator = np.random.RandomState() if isinstance(state[0], str) else random.Random()
    _set_generator_state(generator, state)
    return generator


def _without_arrays(state: Any) -> Any:
    """A numpy generator's state without arrays, which the reader of checkpoints restricts."""
    if isinstance(state, Mapping):
        return {name: _without_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_without_arrays(value) for value in state)
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.str}
    return state.item() if isinstance(state, np.generic) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        if state.keys() == {"array", "dtype"}:
            return np.array(state["array"], dtype=state["dtype"])
        return {name: _with_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_with_arrays(value) for value in state)
    return state


class _Numbered(BatchSampler):
    """A sampler's indices as they are, each batch with its number's seed; the cursor sees every one drawn.

    Everything else is asked of the sampler itself, so that loaders find `set_epoch`, `sampler` and the like.
    """

    def __init__(self, inner: Any, cursor: LoaderCursor) -> None:
        self._inner, self._cursor = inner, cursor

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_cursor"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor
        if not cursor.take_iteration():
            # Somebody looks into the data beside training.
            yield from self._inner
            return
        skip = cursor.begin_drawing()
        drawing = iter(self._inner)
        for number in itertools.count():
            before = rng.host_state() if cursor.watches_draws and number else None
            index = next(drawing, _END)
            if before is not None and not cursor.interleaves and _differ(before, rng.host_state()):
                cursor.interleaves = True
                logger.warning(
                    "%s draws indices from the global random number generators during an epoch: a resumed run "
                    "sees other samples in the rest of that epoch. Draw them when the epoch begins, or from a "
                    "generator of the sampler's own",
                    cursor.name,
                )
            if number == skip:
                cursor.check_order()
            if index is _END:
                if number < skip:
                    raise CheckpointError(
                        f"{cursor.name} ended after {number} batches of an epoch; the checkpoint was made after "
                        f"{skip}: the data set or its sampler has changed. Use those that wrote it, or another "
                        "output_dir"
                    )
                return
            cursor.drawn(number, index)
            if number >= skip:
                yield with_seed(index, cursor.seed_of(number))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        one["python"] != other["python"]
        or not torch.equal(one["cpu"], other["cpu"])
        or one["numpy"][2:] != other["numpy"][2:]
        or not np.array_equal(one["numpy"][1], other["numpy"][1])
    )


class LoaderCursor:
    """The position of training in one loader's order. Attaching it changes the loader in place.

    Attributes:
        epoch: of the batches that are consumed now; set by `begin_epoch`.
        consumed: batches of this epoch that training has used.
        is_left_out: of the resumed epoch no batch is drawn.
        interleaves: the sampler was seen to draw from the host's generators in the middle of an epoch.
        other_ranks: how many there were when the checkpoint was made, and are now, where these differ; for messages.
    """

    def __init__(self, loader: Any, *, seed: int, rank: int, made_for: Layout | None = None, now: Layout | None = None):
        """
        Args:
            loader: a torch DataLoader, or accelerate's wrapper around one.
            seed: of what is drawn while a batch is made.
            rank: of this process; ranks draw differently.
            made_for, now: how steps were divided when the run began, and how they are; where these differ, the same
                samples are given to each step.

        Raises:
            CheckpointError: the loader cannot be followed, or its order cannot be divided in another way.
        """
        self.loader = loader
        self.layout = now or Layout(1, 1, 1)
        base = _torch_loader(loader)
        if base is None:
            raise CheckpointError(f"{type(loader).__name__} is no torch DataLoader")
        self._base, self._seed, self._rank = base, seed, rank
        self.is_stream = isinstance(base.dataset, IterableDataset)
        self.epoch, self.consumed, self.interleaves, self.is_left_out = 0, 0, False, False
        self.other_ranks: tuple[int, int] | None = None
        self._over = self._is_awaited = False
        self._start: dict[str, Any] = {}
        self._resume_from: dict[str, Any] | None = None
        self._digest = xxhash.xxh3_128()
        # After how many batches the digest was what; loaders draw ahead of training.
        self._digests: dict[int, str] = {}
        self.watches_draws = False
        self._samplers: list[tuple[str, Any]] = []
        self._baseline: dict[str, Any] = {}
        # What is resumed, until its order is found to be the same.
        self._expected: Mapping[str, Any] | None = None
        # In the main process, what a stream's data set and collate function draw from.
        self._stream_generators: dict[str, Any] | None = None
        loader.__dict__[_CURSOR] = self
        if self.is_stream:
            self._follow_stream()
            return
        slot = "batch_sampler" if base.batch_sampler is not None else "sampler"
        inner: Any = getattr(base, slot)
        if made_for is not None and now is not None and made_for != now:
            inner = RecutBatchSampler(inner, made_for, now, rank)
        self._samplers = list(_samplers_of(inner))
        self._baseline = _counters(self._samplers)
        modules = [type(sampler).__module__ + "." for _, sampler in self._samplers]
        self.watches_draws = not all(module.startswith(_KNOWN_PACKAGES) for module in modules)
        # DataLoader refuses to have its sampler replaced, as its iterators may hold the old one; there are none yet.
        base.__dict__[slot] = _Numbered(inner, self)

    @classmethod
    def of(cls, loader: Any) -> LoaderCursor | None:
        """The cursor that follows a loader."""
        found = getattr(loader, "__dict__", {}).get(_CURSOR)
        return found if isinstance(found, cls) else None

    @property
    def name(self) -> str:
        """What gives the order, for messages."""
        if self.is_stream:
            return type(self._base.dataset).__name__
        return type(self._samplers[-1][1]).__name__

    def begin_epoch(self, epoch: int) -> None:
        """Say that the next batches are of this epoch, from its beginning unless `resume` said otherwise."""
        self.epoch, self._over, self.is_left_out = epoch, False, False
        self._is_awaited = True
        self.consumed = self._resume_from["consumed"] if self._resume_from is not None else 0

    def set_epoch(self, epoch: int) -> None:
        """`begin_epoch`, and tell whatever in the loader wants to know of it."""
        base = self._base
        inner = getattr(base, "batch_sampler", None)
        told: list[Any] = []
        for part in (self.loader, inner, getattr(inner, "sampler", None), getattr(base, "sampler", None), base.dataset):
            part = getattr(part, "_inner", part)
            if part is not None and hasattr(part, "set_epoch") and not any(part is other for other in told):
                told.append(part)
                part.set_epoch(epoch)
        self.begin_epoch(epoch)

    def iterate(self) -> Iterator[Any]:
        """The loader's batches from the position on. Streams are read up to it, unless the loader can be put there."""
        state = self._resume_from
        if state is None or not self.is_stream:
            return iter(self.loader)
        if state.get("loader") is not None and hasattr(self._base, "load_state_dict"):
            self.loader.load_state_dict(state["loader"])
            return iter(self.loader)
        return itertools.islice(iter(self.loader), state["consumed"], None)

    def consume(self, num_batches: int) -> None:
        """Count batches that training has used."""
        self.consumed += num_batches

    def end_epoch(self) -> None:
        """Say that the epoch is over; nothing of it is to be done again."""
        self._over = True

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The position behind the batches consumed so far, for `resume`; of plain values and tensors."""
        digest = self._digests.get(self.consumed)
        for number in [number for number in self._digests if number < self.consumed]:
            del self._digests[number]
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "over": self._over,
            "order": digest,
            "interleaves": self.interleaves,
            # Without numpy's arrays, so that any reader with `weights_only` can read it.
            "start": _without_arrays(self._start),
            "owned_now": self._owned_states(),
            "counters_now": self._changed_counters(),
            "layout": [self.layout.world_size, self.layout.batch_size, self.layout.accumulation],
            "seed": self._seed,
            "loader": self.loader.state_dict() if self.is_stream and hasattr(self._base, "state_dict") else None,
            "stream": _without_arrays(self._stream_generators),
        }

    def resume(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Continue from a `state`; returns the epoch, and how many of its batches were consumed.

        Raises:
            ValueError: it is no such state.
        """
        epoch, consumed, over = state["epoch"], state["consumed"], state["over"]
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or consumed < 0:
            raise ValueError(f"epoch {epoch!r} or batch {consumed!r} is no count")
        self.interleaves, self._seed = bool(state["interleaves"]), int(state["seed"])
        if over:
            self._set_owned(state["owned_now"], state["counters_now"])
            return epoch + 1, 0
        if consumed:
            self._resume_from = dict(state)
        self.epoch, self.consumed = epoch, consumed
        return epoch, consumed

    def skip(self, num_batches: int) -> None:
        """Begin the next iteration behind so many batches, of which nothing else is known."""
        if num_batches:
            self._resume_from = {"consumed": num_batches, "order": None, "start": None}
            self.consumed = num_batches

    def skipping(self) -> Any:
        """The loader for the epoch that is resumed; streams are read up to the position."""
        return self.loader if not self.is_stream else _Resumed(self)

    @property
    def resumes_mid_epoch(self) -> bool:
        """The next iteration begins behind the epoch's first batch."""
        return self._resume_from is not None

    def skip_epoch(self) -> None:
        """The resumed epoch has no batch left: leave the samplers as its last one did."""
        self.is_left_out = True
        state, self._resume_from = self._resume_from, None
        if state is not None and state["start"] is not None:
            self._set_owned(state["owned_now"], state["counters_now"])

    # -- called by the loader's iterators ------------------------------------------------------------------------

    def take_iteration(self) -> bool:
        """Whether the iteration that begins now is training's: the first one of each epoch that was announced."""
        awaited, self._is_awaited = self._is_awaited, False
        return awaited

    def begin_drawing(self) -> int:
        """An iteration begins to draw; returns how many batches it is to pass over."""
        self._digest.reset()
        self._digests.clear()
        state, self._resume_from = self._resume_from, None
        self._expected = state
        start = state["start"] if state is not None else None
        if start is not None:
            start = {**start, "host": _with_arrays(start["host"])}
            rng.set_host_state(start["host"])
            self._set_owned(start["owned"], start["counters"])
            self._start = dict(start)
        else:
            self._start = {
                "host": rng.host_state(),
                "owned": self._owned_states(),
                "counters": self._changed_counters(),
            }
        return int(state["consumed"]) if state is not None else 0

    def drawn(self, number: int, index: Any) -> None:
        """Batch `number` of this iteration was drawn."""
        self._digest.update(_index_bytes(index))
        self._digests[number + 1] = self._digest.hexdigest()
        if len(self._digests) > 4096:
            # No loader draws so far ahead of training; where nothing is saved, digests must not pile up.
            for old in sorted(self._digests)[:2048]:
                del self._digests[old]

    def check_order(self) -> None:
        """The batches that were passed over are those of the checkpoint.

        Raises:
            CheckpointError: they are others.
        """
        state, self._expected = self._expected, None
        if state is None or state["order"] is None or state["order"] == self._digest.hexdigest():
            return
        if self.interleaves:
            # It was warned of when it was seen.
            return
        if rank_settings().allow_changes:
            logger.warning("%s gives other samples than before the change", self.name)
            return
        if self.other_ranks is not None:
            then, now = self.other_ranks
            raise CheckpointError(
                f"{self.name} gives other samples than before: it divides them by the number of ranks, which was "
                f"{then} and is {now}. Start {then} ranks, or train in another output_dir"
            )
        raise CheckpointError(
            f"{self.name} gives other samples than before: the first {state['consumed']} batches of epoch "
            f"{state['epoch']} differ from those that the checkpoint recorded. The data set, the seed or the sampler "
            "has changed, or its order depends on something that no checkpoint holds. Use what wrote the checkpoint, "
            f"another output_dir, or, after a change of the same job, --allow-changes ({ALLOW_CHANGES_ENV}=1)"
        )

    def seed_of(self, number: int) -> int:
        """Seed of what is drawn while batch `number` of this epoch is made."""
        text = f"{self._seed} {self.epoch} {number} {self._rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    # -- inside --------------------------------------------------------------------------------------------------

    def _owned_states(self) -> dict[str, Any]:
        owners = [sampler for _, sampler in self._samplers]
        return {path: _generator_state(generator) for path, generator in generators_of(*owners)}

    def _changed_counters(self) -> dict[str, Any]:
        """Simple attributes of the samplers that have changed since they were made."""
        now = _counters(self._samplers)
        return {path: value for path, value in now.items() if self._baseline.get(path, value) != value}

    def _set_owned(self, owned: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        missing = dict(owned)
        for path, generator in generators_of(*[sampler for _, sampler in self._samplers]):
            if path in missing:
                _set_generator_state(generator, missing.pop(path))
        for path, state in missing.items():
            # Samplers may make a generator when their first epoch begins; in this process none has begun.
            number, *names = path.split(".")
            owner: Any = self._samplers[int(number)][1] if int(number) < len(self._samplers) else None
            for name in names[:-1]:
                owner = getattr(owner, "__dict__", {}).get(name)
            if names and hasattr(owner, "__dict__") and owner.__dict__.get(names[-1]) is None:
                setattr(owner, names[-1], _new_generator(state))
        samplers = dict(self._samplers)
        for path, value in counters.items():
            name, _, attribute = path.rpartition(".")
            if name in samplers:
                setattr(samplers[name], attribute, value)

    def _follow_stream(self) -> None:
        """A data set without a length is read again up to the position. In the main process, what it draws comes from
        generators of its own, which begin as the host's are when the epoch begins."""
        base, make = self._base, self._base._get_iterator

        def get_iterator() -> Any:
            if not self.take_iteration():
                return make()
            state, self._resume_from = self._resume_from, None
            if state is not None and state["start"] is not None:
                rng.set_host_state(_with_arrays(state["start"]["host"]))
            self._start = {"host": rng.host_state(), "owned": {}, "counters": {}}
            self._stream_generators = self._start["host"]
            iterator: Any = make()
            fetcher = getattr(iterator, "_dataset_fetcher", None)
            if fetcher is not None:
                fetcher.fetch = functools.partial(self._fetch_from_stream, fetcher.fetch)
            if state is not None and state.get("loader") is not None and state["stream"] is not None:
                # It was put to the position, not read up to it.
                self._stream_generators = _with_arrays(state["stream"])
            return iterator

        base.__dict__["_get_iterator"] = get_iterator

    def _fetch_from_stream(self, fetch: Callable[[Any], Any], index: Any) -> Any:
        training = rng.host_state()
        assert self._stream_generators is not None
        _put_back(self._stream_generators)
        try:
            return fetch(index)
        finally:
            self._stream_generators = rng.host_state()
            _put_back(training)


class _Resumed:
    """A loader's batches behind the position, once; everything else is asked of the loader."""

    def __init__(self, cursor: LoaderCursor) -> None:
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:
        if name == "_cursor":
            raise AttributeError(name)
        return getattr(self._cursor.loader, name)

    def __len__(self) -> int:
        return len(self._cursor.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._cursor.iterate()


class RecutBatchSampler(BatchSampler):
    """The order of a run that began with another division of its steps, divided as it is now.

    Each step gets exactly the samples that it would have got, accelerate's filling at an epoch's end included.
    """

    def __init__(self, batches: Any, made_for: Layout, now: Layout, rank: int) -> None:
        """
        Args:
            batches: the batch sampler as accelerate has prepared it for this rank.

        Raises:
            CheckpointError: it is not a plain one, whose order does not depend on how it is divided.
        """
        from accelerate.data_loader import BatchSamplerShard

        sharded = isinstance(batches, BatchSamplerShard)
        plain = batches.batch_sampler if sharded else batches
        if type(plain) is not BatchSampler or (sharded and (batches.split_batches or not batches.even_batches)):
            raise CheckpointError(
                f"the order of {type(plain).__name__} depends on the number of ranks and the size of micro-batches, "
                f"which were {made_for.world_size} x {made_for.batch_size} (accumulation {made_for.accumulation}) and "
                f"now are {now.world_size} x {now.batch_size} ({now.accumulation}): resume with the former"
            )
        self.sampler, self.drop_last, self.batch_size = plain.sampler, plain.drop_last, now.batch_size
        self._made_for, self._now, self._rank = made_for, now, rank

    def _rounds(self) -> Iterator[list[Any]]:
        """What all ranks together drew for their first micro-batches, for their second ones, and so on."""
        from accelerate.data_loader import BatchSamplerShard

        was = self._made_for
        plain = BatchSampler(self.sampler, was.batch_size, self.drop_last)
        if was.world_size == 1:
            yield from plain
            return
        # Each shard reads all batches; the sampler itself may be iterated only once.
        copies = [_Copy(plain, iterator) for iterator in itertools.tee(iter(plain), was.world_size)]
        shards: list[Any] = [BatchSamplerShard(copy, was.world_size, rank) for rank, copy in enumerate(copies)]
        for batches in zip(*shards, strict=True):
            yield list(itertools.chain(*batches))

    def __iter__(self) -> Iterator[list[Any]]:
        now, rounds = self._now, self._rounds()
        first: list[Any] = []
        while step := list(itertools.chain(*itertools.islice(rounds, self._made_for.accumulation))):
            first = first or step
            # An epoch's last step may hold fewer, and not as many for each rank.
            missing = -len(step) % now.world_size
            step += (first * missing)[:missing]
            per_round = now.world_size * now.batch_size
            for begin in range(0, len(step), per_round):
                samples = step[begin : begin + per_round]
                share = len(samples) // now.world_size
                yield samples[self._rank * share : (self._rank + 1) * share]

    def __len__(self) -> int:
        was, now = self._made_for, self._now
        num_samples = len(self.sampler)  # type: ignore[arg-type]
        batches = num_samples // was.batch_size if self.drop_last else math.ceil(num_samples / was.batch_size)
        rounds = batches // was.world_size if self.drop_last else math.ceil(batches / was.world_size)
        whole, rest = divmod(rounds, was.accumulation)
        left = rest * was.world_size * was.batch_size
        if was.world_size == 1 and not self.drop_last:
            # A single process fills nothing up.
            whole, left = divmod(num_samples, was.samples_per_step)
        share = math.ceil(left / now.world_size)
        return whole * now.accumulation + math.ceil(share / now.batch_size)


class _Copy:
    """One of several readers of a batch sampler that is iterated once."""

    def __init__(self, batches: BatchSampler, iterator: Iterator[list[Any]]) -> None:
        self._iterator, self._length = iterator, len(batches)
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        # A shard fills batches up in place.
        return map(list, self._iterator)

    def __len__(self) -> int:
        return self._length


def _torch_loader(loader: Any) -> Any:
    """The torch DataLoader that a loader is, or wraps; None where there is none."""
    # accelerate's wrappers say that they are instances of what they wrap.
    base = loader.__dict__.get("base_dataloader", loader) if hasattr(loader, "__dict__") else loader
    return base if isinstance(base, DataLoader) else None


def _samplers_of(sampler: Any) -> Iterator[tuple[str, Any]]:
    """A sampler and those inside it, by path, the outermost first."""
    path, seen = "order", set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield path, sampler
        name = next((n for n in ("batch_sampler", "sampler") if getattr(sampler, n, None) is not None), None)
        path, sampler = (f"{path}.{name}", getattr(sampler, name)) if name else (path, None)


def _counters(samplers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, sampler in samplers:
        attributes = getattr(sampler, "__dict__", {})
        found |= {f"{path}.{name}": value for name, value in attributes.items() if type(value) in (int, float, bool)}
    return found


def _index_bytes(index: Any) -> bytes:
    if isinstance(index, list) and all(type(one) is int for one in index):
        return np.array(index, dtype=np.int64).tobytes()
    return repr(index).encode()


def fingerprint(dataset: Any) -> str | None:
    """A digest of some of a data set's rows, as they are stored; None where looking could change or cost something.

    A transform that is applied when a row is read is left out: it may draw at random.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        return None
    if isinstance(dataset, Mapping):
        parts = {name: fingerprint(part) for name, part in dataset.items()}
        return None if None in parts.values() else repr(parts)
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):
        dataset = dataset.with_format("arrow")
    elif not isinstance(dataset, (list, tuple, torch.utils.data.TensorDataset)):
        return None
    length, digest = len(dataset), hashlib.blake2b(digest_size=16)
    for index in sorted({round(n * (length - 1) / (_FINGERPRINT_ROWS - 1)) for n in range(_FINGERPRINT_ROWS)}):
        row = dataset[index]
        _add(digest, row.to_pylist() if hasattr(row, "to_pylist") else row)
    return f"{length}:{digest.hexdigest()}"


def _add(digest: Any, value: Any) -> None:
    """Values of unknown types count by their type alone."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = value.detach().cpu().contiguous()
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(str(name).encode())
            _add(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(b"[%d]" % len(value))
        for one in value:
            _add(digest, one)
    elif isinstance(value, (*_SIMPLE, bytes)):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
