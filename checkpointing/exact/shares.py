"""Virtual ranks in a bare loop: what each of them computes of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from checkpointing.exact.gradients import ExactGradients


class Share:
    """What one virtual rank computes of a step; a context, in which its loss is computed and propagated back.

    Args:
        gradients: Of the training.
        virtual_rank: The virtual rank.
        step: Number of the step.
        batch: Its micro-batch.

    Attributes:
        batch: Its micro-batch.
        virtual_rank: Its number.
    """

    def __init__(self, gradients: ExactGradients, virtual_rank: int, step: int, batch: Any) -> None:
        self.batch, self.virtual_rank = batch, virtual_rank
        self._gradients, self._step = gradients, step
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Share:
        self._context.enter_context(self._gradients.of_rank(self.virtual_rank, self._step))
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def in_shares(
    batches: Iterator[list[tuple[int, Any]]], gradients: ExactGradients, first_step: int
) -> Iterator[list[Share]]:
    """Return the shares of each step that this rank computes.

    Args:
        batches: Virtual rank and micro-batch of each, by step.
        gradients: Of the training.
        first_step: Number of the first step.
    """
    for step, mine in enumerate(batches, first_step):
        yield [Share(gradients, virtual_rank, step, batch) for virtual_rank, batch in mine]
