"""`on_save` once a checkpoint is committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerControl, TrainerState

from checkpointing.transformers.callback import CommitNotices


class Handler:
    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []
        self.staged: list[int] = []
        self.callbacks: list[Any] = [self, object()]

    def on_checkpoint_staged(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.staged.append(state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        self.saved.append((state.global_step, len(state.log_history)))
        control.should_save = False
        return control


def set_up(committed: set[int] | None = None) -> tuple[Any, Handler, CommitNotices, TrainerState]:
    handler = Handler()
    manager = SimpleNamespace(
        awaited=None, world_size=1, restoring=SimpleNamespace(is_committed=lambda step: step in (committed or set()))
    )
    trainer = SimpleNamespace(callback_handler=handler, control=TrainerControl(), args=None, _manager=manager)
    return trainer, handler, CommitNotices(trainer), TrainerState(global_step=10)


def save(trainer: Any, state: TrainerState, step: int) -> None:
    state.global_step = step
    state.log_history.append({"step": step})
    trainer.control.should_save = True
    trainer.control = trainer.callback_handler.on_save(None, state, trainer.control)
    assert not trainer.control.should_save


def test_callbacks_hear_of_a_save_at_its_commit_with_the_state_of_its_step() -> None:
    trainer, handler, notices, state = set_up()
    save(trainer, state, 10)
    save(trainer, state, 20)
    assert (handler.staged, handler.saved, trainer._manager.awaited) == ([10, 20], [], 10)
    # A request of the step that runs now is not taken back.
    trainer.control.should_save = True
    notices.notify(committed=True)
    assert (handler.saved, trainer._manager.awaited) == ([(10, 1)], 20)
    assert trainer.control.should_save


def test_a_save_that_was_not_committed_is_not_reported() -> None:
    trainer, handler, notices, state = set_up()
    save(trainer, state, 10)
    notices.notify(committed=False)
    notices.notify(committed=True)
    assert handler.saved == [] and trainer._manager.awaited is None


def test_at_the_end_storage_is_asked() -> None:
    trainer, handler, notices, state = set_up(committed={20})
    save(trainer, state, 10)
    save(trainer, state, 20)
    notices.notify_all()
    assert handler.saved == [(20, 2)]


def test_another_training_begins_with_none() -> None:
    trainer, handler, notices, state = set_up(committed={10})
    save(trainer, state, 10)
    notices.forget()
    notices.notify_all()
    assert handler.saved == []


def test_what_a_callback_draws_does_not_change_what_training_draws() -> None:
    """The step at which a commit is known depends on the storage: two runs that nobody disturbed ended differently."""
    trainer, _, notices, state = set_up()
    saved: list[int] = []

    def sample(args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        torch.rand(5)
        saved.append(state.global_step)
        return control

    notices._notify_now = sample
    save(trainer, state, 10)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    notices.notify(committed=True)
    assert torch.equal(torch.rand(2), expected) and saved == [10]
