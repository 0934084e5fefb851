"""What a checkpoint records of the data: the position, and digests of the order and of the data set."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from checkpointing.data.dealing import StepLayout
from checkpointing.data.generators import with_arrays, without_arrays
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import ALLOW_CHANGES_ENV, rank_settings

logger = logging.getLogger("checkpointing")

# No loader draws further ahead of training. Where nothing is saved, digests must not pile up.
_MAX_DIGESTS = 4096
# Rows that the digest covers, spread evenly over the data set.
_NUM_ROWS = 16
_SIMPLE = (int, float, str, bool, bytes, type(None))


@dataclass(frozen=True)
class EpochStart:
    """What the order of an epoch depended on when the epoch began.

    Attributes:
        host: States of the host's generators, see `rng.host_state`.
        generators: States of the samplers' own generators, by path.
        counters: Changed simple attributes of the samplers, by path.
    """

    host: Mapping[str, Any]
    generators: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {"host": without_arrays(self.host), "owned": self.generators, "counters": self.counters}

    @classmethod
    def from_state(cls, state: Any) -> EpochStart | None:
        """Parse what `to_state` returned; None where no epoch had begun in the process that saved."""
        if not state:
            return None
        return cls(with_arrays(state["host"]), _mapping(state["owned"]), _mapping(state["counters"]))


@dataclass(frozen=True)
class Position:
    """The position behind the batches that training has used.

    Attributes:
        epoch: Number of the epoch.
        consumed: Batches of this epoch that training has used.
        over: The epoch has ended.
        order: Digest of the indices of those batches; None where it is not known.
        interleaves: The sampler draws from the host's generators in mid-epoch, so that its order cannot be replayed.
        start: State when the epoch began; None where it is not known.
        generators: States of the samplers' own generators at the position.
        counters: Changed simple attributes of the samplers at the position.
        layout: How steps were divided; None in records that do not say.
        seed: Of what is drawn while a batch is made; None leaves the loader's own.
        loader: State of a stateful loader of a stream.
        stream: Host generator states that a stream in the main process draws from, at the position.
    """

    epoch: int
    consumed: int
    over: bool = False
    order: str | None = None
    interleaves: bool = False
    start: EpochStart | None = None
    generators: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    layout: StepLayout | None = None
    seed: int | None = None
    loader: Any = None
    stream: Mapping[str, Any] | None = None

    def to_state(self) -> dict[str, Any]:
        """Return plain values and tensors, so that any reader with `weights_only` can read them."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "over": self.over,
            "order": self.order,
            "interleaves": self.interleaves,
            "start": self.start.to_state() if self.start is not None else {},
            "owned_now": self.generators,
            "counters_now": self.counters,
            "layout": self.layout.to_list() if self.layout is not None else None,
            "seed": self.seed,
            "loader": self.loader,
            "stream": without_arrays(self.stream),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Parse what `to_state` returned; for the errors, see `LoaderCursor.resume`."""
        epoch, consumed = state["epoch"], state["consumed"]
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or consumed < 0:
            raise ValueError(f"epoch {epoch!r} or batch {consumed!r} is not a count")
        layout = state.get("layout")
        return cls(
            epoch,
            consumed,
            over=bool(state["over"]),
            order=state["order"],
            interleaves=bool(state["interleaves"]),
            start=EpochStart.from_state(state["start"]),
            generators=_mapping(state["owned_now"]),
            counters=_mapping(state["counters_now"]),
            layout=StepLayout.from_list(layout) if layout is not None else None,
            seed=int(state["seed"]),
            loader=state.get("loader"),
            stream=with_arrays(state.get("stream")),
        )

    def recut(self, now: StepLayout, steps_per_epoch: int) -> Position:
        """Return the position in the micro-batches of another layout."""
        if self.layout is None:
            raise ValueError("the position does not say how steps were divided")
        if self.layout == now:
            return self
        # An epoch's last step may be shorter.
        steps = math.ceil(self.consumed / self.layout.accumulation)
        return replace(self, consumed=min(steps, steps_per_epoch) * now.accumulation, order=None)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a {type(value).__name__} is not a mapping")
    return value


class OrderDigest:
    """Digests of the indices drawn so far, one after each batch: loaders draw ahead of training."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._by_count: dict[int, str] = {}

    def reset(self) -> None:
        """Begin another epoch."""
        self._digest.reset()
        self._by_count.clear()

    def add(self, number: int, index: Any) -> None:
        """Add the index of batch `number`, counted from 0."""
        self._digest.update(_index_bytes(index))
        self._by_count[number + 1] = self._digest.hexdigest()
        if len(self._by_count) > _MAX_DIGESTS:
            for old in sorted(self._by_count)[: _MAX_DIGESTS // 2]:
                del self._by_count[old]

    @property
    def newest(self) -> str:
        """Digest of everything that was added."""
        return str(self._digest.hexdigest())

    def after(self, count: int) -> str | None:
        """Return the digest of the first `count` batches, None if unknown; forget those of fewer batches."""
        for number in [number for number in self._by_count if number < count]:
            del self._by_count[number]
        return self._by_count.get(count)


def check_order(recorded: Position, digest: str, name: str, other_ranks: tuple[int, int] | None = None) -> None:
    """Compare the digest of an order that was replayed up to a recorded position with the one that is recorded there.

    For messages, `name` is that of what gives the order, and `other_ranks` the numbers of ranks then and now, where
    they differ.

    Raises:
        CheckpointError: The batches are others than those that training has used.
    """
    if recorded.order in (None, digest):
        return
    if rank_settings().allow_changes:
        logger.warning("%s gives other samples than before the change", name)
        return
    if other_ranks is not None:
        then, now = other_ranks
        raise CheckpointError(
            f"{name} gives other samples than before: it divides them by the number of ranks, which was {then} and is "
            f"{now}. Start {then} ranks, or train in another output_dir"
        )
    raise CheckpointError(
        f"{name} gives other samples than before: the first {recorded.consumed} batches of epoch {recorded.epoch} "
        "differ from those that the checkpoint recorded. The data set, the seed or the sampler has changed, or its "
        "order depends on something that no checkpoint holds: a generator without a seed (random.Random(), os.urandom) "
        "or hash() of text, which needs PYTHONHASHSEED. Use what wrote the checkpoint, another output_dir, or, "
        f"after a change of the same job, --allow-changes ({ALLOW_CHANGES_ENV}=1)"
    )


def ended_early(name: str, number: int, consumed: int) -> CheckpointError:
    """Return the error of an order that is over after fewer batches of an epoch than training has used."""
    return CheckpointError(
        f"{name} ended after {number} batches of an epoch; the checkpoint was made after {consumed}: the data set or "
        "its sampler has changed. Use those that wrote it, or another output_dir"
    )


def _index_bytes(index: Any) -> bytes:
    if isinstance(index, list) and all(type(one) is int for one in index):
        return np.array(index, dtype=np.int64).tobytes()
    return repr(index).encode()


def num_rows(dataset: Any) -> str | None:
    """Return the number of a data set's rows as text, which is known also where `data_digest` may read none."""
    known = isinstance(dataset, Sized) and not isinstance(dataset, (IterableDataset, Mapping))
    return str(len(dataset)) if known else None


def data_digest(dataset: Any) -> str | None:
    """Return the number of a data set's rows, and a digest of some of them as they are stored.

    A transform that is applied when a row is read is left out, since it may draw at random. None where reading rows
    could have side effects or be expensive.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        return None
    if isinstance(dataset, Mapping):
        parts = {name: data_digest(part) for name, part in dataset.items()}
        return None if None in parts.values() else repr(parts)
    if isinstance(dataset, (Subset, ConcatDataset)):
        inner = [dataset.dataset] if isinstance(dataset, Subset) else dataset.datasets
        digests = [data_digest(one) for one in inner]
        chosen = data_digest(list(dataset.indices)) if isinstance(dataset, Subset) else str(len(digests))
        return None if None in digests else repr([chosen, *digests])
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):
        dataset = dataset.with_format("arrow")
    elif not isinstance(dataset, (list, tuple, TensorDataset)):
        return None
    length, digest = len(dataset), hashlib.blake2b(digest_size=16)
    for index in sorted({round(n * (length - 1) / (_NUM_ROWS - 1)) for n in range(_NUM_ROWS)}):
        row = dataset[index]
        _update(digest, row.to_pylist() if hasattr(row, "to_pylist") else row)
    return f"{length}:{digest.hexdigest()}"


def _update(digest: Any, value: Any) -> None:
    """Add a value to the digest; values of unknown types count by their type alone."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = value.detach().cpu().contiguous()
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(str(name).encode())
            _update(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(b"[%d]" % len(value))
        for one in value:
            _update(digest, one)
    elif isinstance(value, _SIMPLE):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
