"""Samples of the state as it was handed over, by which a torn copy is found.

Between `CheckpointManager.step` and the next optimizer step nothing but an optimizer may change the state, and torch's
version counters show much of what does all the same. They do not show writes through `.data`, from another stream, or
by code outside torch. So some of each tensor's words are kept when the state is handed over: all of a small tensor, and
words at equal distances of a large one, from a place that is drawn again for each snapshot. A copy that differs from
them holds something of another moment. The same words are read again before the optimizer steps: what has changed by
then without an optimizer is in no checkpoint of that step.

A change of a part in one piece is found if the piece is longer than the distance: at most one part in
`WORDS` of the tensor. A change of single words elsewhere is found by chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from checkpointing.files import sharding
from checkpointing.files.file_images import Extent
from checkpointing.process.device import Later

# Words of 8 bytes: those that are kept of a large tensor, and the size up to which all are.
WORDS = 128
_SMALL_WORDS = 512


@dataclass
class _Group:
    """The samples on one device, of words of one size.

    Attributes:
        views: The words of each tensor, by reference.
        names: Names of the tensors.
        tensors: The tensors.
        phases: Where the first word of each tensor is taken; see `_view`.
        places: Where each tensor's data was.
        values: The words as they were handed over.
    """

    word_bytes: int
    views: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    phases: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    values: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        return torch.cat(self.views)

    def names_at(self, differs: np.ndarray) -> list[str]:
        """Return the names of the tensors that have one of these samples."""
        ends = np.cumsum([len(view) for view in self.views])
        return [self.names[number] for number in np.unique(np.searchsorted(ends, np.flatnonzero(differs), "right"))]

    def addresses(self) -> np.ndarray:
        return np.concatenate(
            [
                view.data_ptr() + np.arange(len(view), dtype=np.int64) * (view.stride(0) * self.word_bytes)
                for view in self.views
            ]
        )


def _span(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """Return a tensor's storage, and the first byte and the number of bytes that it takes there; None without any."""
    if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None  # A subclass that is several tensors.
    size = tensor.element_size()
    elements = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, nbytes = int(tensor.storage_offset()) * size, int(elements) * size
    # What has been resized away cannot be read.
    return (storage, first, nbytes) if storage.data_ptr() and first + nbytes <= storage.nbytes() else None


def _view(
    storage: torch.UntypedStorage, first: int, nbytes: int, phase: float, count: int = WORDS, small: int = _SMALL_WORDS
) -> torch.Tensor:
    """Return the words that are kept of a part of a storage; `phase`, from 0 to 1, says where the first one is."""
    whole = first % 8 == 0 and nbytes % 8 == 0
    kind, word_bytes = (torch.int64, 8) if whole else (torch.uint8, 1)
    words, at = nbytes // word_bytes, first // word_bytes
    # Odd, so that it is no multiple of a row's length.
    distance = 1 if words <= small else (words // count) | 1
    skipped = int(phase * distance)
    empty: Any = torch.empty(0, dtype=kind, device=storage.device)
    found: torch.Tensor = empty.set_(storage, at + skipped, (-(-(words - skipped) // distance),), (distance,))
    return found


def spread_words(tensor: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return about so many words of a tensor at equal distances, by reference; None where it has no memory to read.

    Args:
        tensor: On any device, of any type.
        count: Number of words of 8 bytes, or of bytes where the tensor is not made of whole words.

    Returns:
        A one-dimensional tensor, of int64 or uint8, that shares the tensor's memory.
    """
    span = _span(tensor)
    return _view(*span, 0.5, count, count) if span is not None else None


class Sampler:
    """Draws the samples of one training.

    Args:
        seed: Of the places; by default others in each process.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._draw = random.Random(seed)
        self._sources: list[tuple[str, torch.Tensor]] = []
        self._groups: list[_Group] = []

    def hand_over(self, sources: Sequence[tuple[str, torch.Tensor]]) -> Samples:
        """Keep samples of tensors as they are now, in the training thread.

        Args:
            sources: Tensors with their names.
        """
        if not self._fits(sources):
            self._prepare(sources)
        groups, self._groups = self._groups, []
        for group in groups:
            group.values = group.read()
        return Samples(groups)

    def prepare_next(self) -> None:
        """Draw other places, in the copy thread, so that the next snapshot need not."""
        if self._sources:
            self._prepare(self._sources)

    def _fits(self, sources: Sequence[tuple[str, torch.Tensor]]) -> bool:
        places = [place for group in self._groups for place in group.places]
        return bool(self._groups) and (
            len(sources) == len(self._sources)
            and all(one[1] is other[1] for one, other in zip(sources, self._sources, strict=True))
            and all(
                tensor.data_ptr() == place
                for tensor, place in zip((t for g in self._groups for t in g.tensors), places, strict=True)
            )
        )

    def _prepare(self, sources: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._sources = list(sources)
        groups: dict[tuple[torch.device, torch.dtype], _Group] = {}
        seen = set()
        for name, tensor in sources:
            span = _span(tensor)
            if span is None or (key := (span[0]._cdata, span[1])) in seen:
                continue
            seen.add(key)
            phase = self._draw.random()
            view = _view(*span, phase)
            group = groups.setdefault((view.device, view.dtype), _Group(view.element_size()))
            group.views.append(view)
            group.names.append(name)
            group.tensors.append(tensor)
            group.phases.append(phase)
            group.places.append(tensor.data_ptr())
        self._groups = list(groups.values())


class Samples:
    """Samples of one step's state.

    Args:
        groups: By device and size of a word.
    """

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._groups = groups
        self._after: list[torch.Tensor] = []

    @property
    def values(self) -> list[torch.Tensor]:
        """The words as they were handed over, by device and size of a word."""
        return [group.values for group in self._groups if group.values is not None]

    def read_again(self) -> None:
        """Read the state again at the end of the copy, behind what is enqueued on this thread's current streams."""
        self._after = [_now(group) for group in self._groups]

    def torn(self, extents: Sequence[Extent], buffer: memoryview) -> list[str]:
        """Return the names of tensors of which the copy, or the state at its end, is not what was handed over.

        Args:
            extents: What was copied, and where in `buffer`; the copy is over.
            buffer: The arena.
        """
        found: list[str] = []
        memory = np.frombuffer(buffer, np.uint8)
        table = _Table(extents)
        for group, after in zip(self._groups, self._after, strict=True):
            assert group.values is not None
            before = group.values.cpu().numpy()
            differs = before != after.cpu().numpy()
            places, is_copied = table.places(group.addresses(), group.word_bytes)
            words = memory[places[:, None] + np.arange(group.word_bytes)]
            copied = np.ascontiguousarray(words).view(before.dtype)[:, 0]
            differs[is_copied] |= copied != before[is_copied]
            found += group.names_at(differs)
        return found

    def look(self) -> Look:
        """Read the state once more, in the training thread, before an optimizer steps; no device is waited for."""
        return Look(self._groups, [_now(group) for group in self._groups])


def _now(group: _Group) -> torch.Tensor:
    """Return a group's words as they are now, also of tensors whose memory has been replaced."""
    views = list(group.views)
    for number, tensor in enumerate(group.tensors):
        if tensor.data_ptr() == group.places[number]:
            continue
        span = _span(tensor)
        view = _view(*span, group.phases[number]) if span is not None else None
        old = views[number]
        if view is not None and (view.device, view.dtype, view.shape) == (old.device, old.dtype, old.shape):
            views[number] = view
        elif is_gone(old):
            views[number] = torch.zeros(old.shape, dtype=old.dtype, device=old.device)
    return torch.cat(views)


def is_gone(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor of one dimension was released under it (`resize_` of its storage)."""
    last = int(tensor.storage_offset()) + (len(tensor) - 1) * tensor.stride(0)
    return (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes()


class Look:
    """What the state was before an optimizer stepped.

    Args:
        groups: What was handed over.
        values: The same words before that step.
    """

    def __init__(self, groups: Sequence[_Group], values: Sequence[torch.Tensor]) -> None:
        self._groups, self._values = groups, values
        pairs = [(group.values, now) for group, now in zip(groups, values, strict=True) if group.values is not None]
        self._flags = [Later((before != now).any().to(torch.float32)) for before, now in pairs]

    def changed(self) -> list[str]:
        """Return the names of tensors that differ from what was handed over."""
        if not any(float(flag) for flag in self._flags):
            return []
        found: list[str] = []
        for group, now in zip(self._groups, self._values, strict=True):
            assert group.values is not None
            found += group.names_at((now != group.values).cpu().numpy())
        return found


class _Table:
    """Where each byte of memory was copied to."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        placed = sorted(extents, key=lambda extent: extent.source.data_ptr())
        self._extents = placed
        self._begins = np.array([extent.source.data_ptr() for extent in placed], np.int64)
        self._sizes = np.array([extent.source.numel() for extent in placed], np.int64)
        self._offsets = np.array([extent.offset for extent in placed], np.int64)
        self._is_strided = np.array([bool(extent.strides) for extent in placed], bool)

    def places(self, addresses: np.ndarray, word_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of words that were copied, and a mask of which words that are."""
        if not len(self._begins):
            return np.zeros(0, np.int64), np.zeros(len(addresses), bool)
        number = np.clip(np.searchsorted(self._begins, addresses, "right") - 1, 0, None)
        distance = addresses - self._begins[number]
        inside = (distance >= 0) & (distance + word_bytes <= self._sizes[number])
        found = self._offsets[number] + distance
        for one in np.unique(number[inside & self._is_strided[number]]):
            mine = inside & (number == one)
            extent = self._extents[one]
            *counts, length = extent.source.shape
            run, rest = np.divmod(distance[mine], length)
            places = extent.offset + rest
            for level in (np.unravel_index(run, counts),):
                places = places + sum(index * step for index, step in zip(level, extent.strides, strict=True))
            found[mine] = places
            # A word at the end of a run goes to two places.
            inside[np.flatnonzero(mine)[rest + word_bytes > length]] = False
        return found[inside], inside


def named_tensors(obj: object, path: str) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with their paths."""
    if isinstance(obj, torch.Tensor):
        yield path, obj._local_tensor if sharding.is_dtensor(obj) else obj  # type: ignore[attr-defined]
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield from named_tensors(value, f"{path}[{key!r}]")
    elif isinstance(obj, (list, tuple)):
        for number, value in enumerate(obj):
            yield from named_tensors(value, f"{path}[{number}]")


def listed(names: Sequence[str]) -> str:
    """Return how many tensors these are, and the first names."""
    shown = ", ".join(names[:3]) + (", …" if names[3:] else "")
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({shown})"
