"""What runs between steps is no step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.transformers.callback import outside_steps, watch_callbacks


class Manager:
    """Remembers whether a step runs."""

    def __init__(self) -> None:
        self.phase = "step"

    def pause(self) -> None:
        self.phase = "pause"

    @contextlib.contextmanager
    def outside_steps(self) -> Iterator[None]:
        before, self.phase = self.phase, "outside"
        yield
        self.phase = before


class Handler:
    """The callback handler of a trainer, with a callback that looks at the phase."""

    def __init__(self, manager: Manager) -> None:
        self.seen: list[Any] = []
        self._manager = manager

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> str:
        self.seen.append((event, self._manager.phase, args, kwargs))
        return event


def trainer(*, is_in_train: bool = True) -> Any:
    manager = Manager()
    return SimpleNamespace(callback_handler=Handler(manager), _manager=manager, is_in_train=is_in_train)


@pytest.mark.parametrize(
    ("event", "during", "after"),
    [
        ("on_log", "outside", "step"),
        ("on_save", "outside", "step"),
        ("on_evaluate", "outside", "step"),
        ("on_epoch_end", "pause", "pause"),
        ("on_step_end", "step", "step"),
        ("on_optimizer_step", "step", "step"),
    ],
)
def test_what_callbacks_do_between_steps_is_no_step(event: str, during: str, after: str) -> None:
    own = trainer()
    watch_callbacks(own)
    assert own.callback_handler.call_event(event, "args", logs=1) == event
    assert own.callback_handler.seen == [(event, during, ("args",), {"logs": 1})] and own._manager.phase == after


def test_before_and_after_training_nothing_is_noted() -> None:
    own = trainer(is_in_train=False)
    watch_callbacks(own)
    for event in ("on_log", "on_epoch_end"):
        own.callback_handler.call_event(event)
    with outside_steps(own):
        assert own._manager.phase == "step"
    assert [phase for _, phase, *_ in own.callback_handler.seen] == ["step", "step"]
