"""The record of a position in a loader's order, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpointing.data.generators import with_arrays, without_arrays
from checkpointing.data.step_layout import StepLayout


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
        """Parse what `to_state` returned; None where no epoch had begun in the process that saved.

        Raises:
            KeyError: A part is missing.
            ValueError: A part is not a mapping.
        """
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
        """Parse what `to_state` returned.

        Raises:
            KeyError: A part is missing.
            TypeError: A part has another type.
            ValueError: A part has a value that is not possible.
        """
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


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a {type(value).__name__} is not a mapping")
    return value
