"""Virtual ranks in a bare loop: what each of them computes of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from checkpointing.errors import CheckpointError
from checkpointing.exact.gradients import ExactGradients
from checkpointing.exact.self_test import Buffers, changing


class Share:
    """What one virtual rank computes of a step; a context, in which its loss is computed and propagated back.

    Attributes:
        batch: Its micro-batch.
        virtual_rank: Its number.
        is_done: Whether it was computed.
    """

    def __init__(self, shares: Shares, virtual_rank: int, batch: Any) -> None:
        self.batch, self.virtual_rank, self.is_done = batch, virtual_rank, False
        self._shares = shares
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Share:
        self._context.enter_context(self._shares.computing(self.virtual_rank))
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self.is_done = error[0] is None


class Shares(Iterator[list[Share]]):
    """The shares of each step that this rank computes.

    Args:
        batches: Virtual rank and micro-batch of each, by step.
        gradients: Of the training.
        last_step: Returns the number of the last step that has ended.
        drawn: Called with this when it has drawn a step.
    """

    def __init__(
        self,
        batches: Iterator[list[tuple[int, Any]]],
        gradients: ExactGradients,
        last_step: Callable[[], int],
        drawn: Callable[[Shares], None] = lambda shares: None,
    ) -> None:
        self._batches, self._gradients, self._last_step, self._notify = batches, gradients, last_step, drawn
        self._drawn: list[Share] = []
        self._is_first = True
        modules = gradients.module.named_modules()
        self._with_statistics = [(name, one) for name, one in modules if isinstance(one, _NormBase)]

    def __next__(self) -> list[Share]:
        self.check_done()
        self._drawn = [Share(self, virtual_rank, batch) for virtual_rank, batch in next(self._batches)]
        self._notify(self)
        return self._drawn

    def check_done(self) -> None:
        """Check that all shares drawn last have been computed: else the gradients are not those of the step."""
        left = [share.virtual_rank for share in self._drawn if not share.is_done]
        if left:
            raise CheckpointError(
                f"{len(left)} of {len(self._drawn)} shares of the step were not computed (virtual ranks "
                f"{', '.join(map(str, left))}): compute the loss of each, and propagate it back, in `with share:`, "
                "before manager.step() and before the next shares are taken"
            )

    def skip(self) -> None:
        """Leave out what was drawn last, if none of it was computed."""
        if not any(share.is_done for share in self._drawn):
            self._drawn = []

    @contextlib.contextmanager
    def computing(self, virtual_rank: int) -> Iterator[None]:
        """Compute the share of a virtual rank in the context; its buffers must not change."""
        for name, module in self._with_statistics:
            if module.training and module.track_running_stats:
                raise CheckpointError(changing((f"the statistics of {name} ({type(module).__name__})",)))
        # In the first one only: what a module keeps of a micro-batch, it keeps of each.
        buffers = Buffers(self._gradients.module) if self._is_first else None
        with self._gradients.of_rank(virtual_rank, self._last_step()):
            yield
        if buffers is not None:
            buffers.check()
        self._is_first = False
