"""An evaluation that all ranks can agree to cut short, so that a stop need not wait for its end."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from checkpointing.process import rng


class EvaluationCutShort(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


class StopAgreement(Protocol):
    """The part of `CheckpointManager` that is needed outside steps."""

    def pause(self) -> None:
        """Report that what runs now is not a step."""

    def agree_to_stop(self) -> bool:
        """Return whether any rank was asked to stop."""


class InterruptibleEvaluation:
    """Generator states around evaluations: a resumed run repeats one that was cut short.

    Attributes:
        before: States when the present evaluation began; None if none runs that may be cut short.
        after: States after an evaluation that was repeated, until the training loop sets them again.
    """

    def __init__(self, manager: StopAgreement, world_size: int) -> None:
        """Ask `manager` for stops."""
        self._manager, self._world_size = manager, world_size
        self.before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None

    def begin(self, *, can_be_repeated: bool) -> None:
        """Begin an evaluation.

        Args:
            can_be_repeated: The position in the data is known, and this step is not saved yet. Otherwise a resumed run
                would not know that the evaluation is due.
        """
        self._manager.pause()
        if can_be_repeated:
            self.before = rng.state(self._world_size)

    def step(self) -> None:
        """Evaluate a batch; called by every rank.

        Raises:
            EvaluationCutShort: All ranks have agreed to stop.
        """
        self._manager.pause()
        if self.before is not None and self._manager.agree_to_stop():
            raise EvaluationCutShort

    def end(self) -> None:
        """End the evaluation, if one runs."""
        self.before = None

    def was_repeated(self) -> None:
        """Keep the generators' states: the Trainer sets them again once the first batch is drawn."""
        self.after = rng.state(self._world_size)


# `on_step_end` and those before it are parts of a step.
_BETWEEN_STEPS = {"on_log", "on_save", "on_evaluate", "on_predict", "on_push_begin"}


def outside_steps(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Note, while training, that no step runs; before and after training, do nothing."""
    if not trainer.is_in_train:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = trainer._manager.outside_steps()
    return found


def watch_callbacks(trainer: Any) -> None:
    """Have the time that callbacks take between steps not count as that of a step: trackers and uploads may be slow."""
    handler = trainer.callback_handler
    call = handler.call_event

    def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_epoch_end" and trainer.is_in_train:
            # Until the next epoch's first step.
            trainer._manager.pause()
        with outside_steps(trainer) if event in _BETWEEN_STEPS else contextlib.nullcontext():
            return call(event, *args, **kwargs)

    handler.call_event = call_event
