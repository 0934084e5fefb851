"""What `resilient` is asked for, as far as training needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ResilientOptions:
    """ResilientOptions of `resilient` that training needs.

    Attributes:
        states: Further objects that are saved, by name.
        divisor: Number of parts into which each micro-batch is cut.
        saves_by_price: Commits are made when they are worth their price, not when the Trainer wants to save.
        check_finite: See `StepGuard`.
        spike_zscore: See `StepGuard`.
        seekable_stream: The data is read by the stream's own state.
        shuffle_samples: See `StreamBatches`.
        virtual_ranks: Number of virtual ranks; 0 for none.
        on_host: Keep sums of virtual ranks' gradients in the host's memory.
    """

    states: Mapping[str, Any] = field(default_factory=dict)
    divisor: int = 1
    saves_by_price: bool = False
    check_finite: bool = True
    spike_zscore: float | None = None
    seekable_stream: bool = False
    shuffle_samples: int | None = None
    virtual_ranks: int = 0
    on_host: bool = False
