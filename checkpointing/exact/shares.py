"""Virtual ranks in a bare loop: what each of them computes of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.exact.gradients import ExactGradients
from checkpointing.exact.self_test import Buffers


class Share:
    """What one virtual rank computes of a step; a context, in which its loss is computed and propagated back.

    Args:
        gradients: Of the training.
        virtual_rank: The virtual rank.
        step: Number of the step.
        batch: Its micro-batch.
        buffers: The model's, which must not change in it; None to let it.

    Attributes:
        batch: Its micro-batch.
        virtual_rank: Its number.
        is_done: Whether it was computed.
    """

    def __init__(
        self, gradients: ExactGradients, virtual_rank: int, step: int, batch: Any, buffers: Buffers | None = None
    ) -> None:
        self.batch, self.virtual_rank, self.is_done = batch, virtual_rank, False
        self._gradients, self._step, self._buffers = gradients, step, buffers
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Share:
        self._context.enter_context(self._gradients.of_rank(self.virtual_rank, self._step))
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        if error[:1] == (None,):
            self.is_done = True
            if self._buffers is not None:
                self._buffers.check()


class Shares(Iterator[list[Share]]):
    """The shares of each step that this rank computes.

    Args:
        batches: Virtual rank and micro-batch of each, by step.
        gradients: Of the training.
        first_step: Number of the first step.
    """

    def __init__(self, batches: Iterator[list[tuple[int, Any]]], gradients: ExactGradients, first_step: int) -> None:
        self._batches, self._gradients, self._step = batches, gradients, first_step
        self._drawn: list[Share] = []
        # In the first step only: what a module keeps of a micro-batch, it keeps of each.
        self._buffers: Buffers | None = None
        self._is_first = True

    def __next__(self) -> list[Share]:
        """Draw the next step.

        Raises:
            CheckpointError: The last one was not computed.
        """
        self.check_done()
        mine = next(self._batches)
        buffers = Buffers(self._gradients.module) if self._is_first else None
        self._is_first = False
        self._drawn = [Share(self._gradients, virtual_rank, self._step, batch, buffers) for virtual_rank, batch in mine]
        self._step += 1
        return self._drawn

    def check_done(self) -> None:
        """Check that all shares that were drawn last have been computed.

        Raises:
            CheckpointError: Some have not: the gradients are not those of the step.
        """
        left = [share.virtual_rank for share in self._drawn if not share.is_done]
        if left:
            raise CheckpointError(
                f"{len(left)} of {len(self._drawn)} shares of the step were not computed (virtual ranks "
                f"{', '.join(map(str, left))}): compute the loss of each, and propagate it back, in `with share:`, "
                "before manager.step() and before the next shares are taken"
            )
