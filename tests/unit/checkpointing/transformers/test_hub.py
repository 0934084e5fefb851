"""What is uploaded to the Hub during training, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from checkpointing.errors import CheckpointError
from checkpointing.transformers.callback import CommitNotices
from checkpointing.transformers.hub import HubPushes


class Pushed:
    """In place of a trainer: the Trainer's own upload of a folder is recorded."""

    def __init__(self, folder: Path, **args: Any) -> None:
        values = {"push_to_hub": True, "hub_strategy": HubStrategy.EVERY_SAVE, "hub_always_push": False} | args
        self.args = SimpleNamespace(output_dir=str(folder), **values)
        self.state, self.control = TrainerState(global_step=99), object()
        self.callback_handler = SimpleNamespace(on_push_begin=lambda args, state, control: self.begun.append(state))
        self.processing_class: Any = object()
        self._session = SimpleNamespace(stopping=False)
        self._manager = SimpleNamespace(static_files={"config.json": b"{}"}, restoring=self)
        self.is_first, self.push_in_progress = True, PushInProgress()
        self.begun: list[TrainerState] = []
        self.uploaded: list[tuple[int, list[str], list[str]]] = []
        self.may_export, self.exports, self.error = threading.Event(), threading.Event(), ""
        self.may_export.set()

    def is_world_process_zero(self) -> bool:
        return self.is_first

    def export(self, step: int, directory: Path) -> None:
        self.exports.set()
        self.may_export.wait(10)
        if self.error:
            raise CheckpointError(self.error)
        directory.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (directory / name).write_text(str(step))

    def _push_from_checkpoint(self, folder: str) -> None:
        assert self.processing_class is None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        files = [sorted(path.name for path in Path(place).iterdir()) for place in (folder, self.args.output_dir)]
        self.uploaded.append((self.state.global_step, files[0], files[1]))
        self.push_in_progress = PushInProgress([])


def wait_for(trainer: Pushed) -> None:
    trainer.push_in_progress.wait_until_done()


def test_a_committed_checkpoint_is_uploaded_from_storage_while_training_goes_on(tmp_path: Path) -> None:
    trainer = Pushed(tmp_path)
    pushes, state = HubPushes(trainer), TrainerState(global_step=5)
    trainer.may_export.clear()
    pushes.push(state)
    assert trainer.begun == [state] and trainer.uploaded == [] and not trainer.push_in_progress.is_done()
    trainer.may_export.set()
    wait_for(trainer)
    assert trainer.uploaded == [(5, ["config.json", "model.safetensors"], ["config.json"])]
    # What trains is as it was, and nothing is left.
    assert trainer.state.global_step == 99 and trainer.args.output_dir == str(tmp_path)
    assert trainer.processing_class is not None and list(tmp_path.iterdir()) == []


def stops(trainer: Pushed) -> None:
    trainer._session.stopping = True


def is_another_rank(trainer: Pushed) -> None:
    trainer.is_first = False


def pushes_at_the_end(trainer: Pushed) -> None:
    trainer.args.hub_strategy = HubStrategy.END


def pushes_nothing(trainer: Pushed) -> None:
    trainer.args.push_to_hub = False


@pytest.mark.parametrize("change", [stops, is_another_rank, pushes_at_the_end, pushes_nothing])
def test_nothing_is_uploaded_where_it_is_not_wanted(change: Callable[[Pushed], None], tmp_path: Path) -> None:
    trainer = Pushed(tmp_path)
    change(trainer)
    HubPushes(trainer).push(TrainerState(global_step=5))
    wait_for(trainer)
    assert trainer.uploaded == [] and trainer.begun == []


@pytest.mark.parametrize(("always", "steps"), [(False, [5, 15]), (True, [5, 10, 15])])
def test_of_those_that_wait_the_newest_is_uploaded(always: bool, steps: list[int], tmp_path: Path) -> None:
    trainer = Pushed(tmp_path, hub_always_push=always)
    pushes = HubPushes(trainer)
    trainer.may_export.clear()
    pushes.push(TrainerState(global_step=5))
    assert trainer.exports.wait(10)
    for step in (10, 15):
        pushes.push(TrainerState(global_step=step))
    trainer.may_export.set()
    wait_for(trainer)
    assert [step for step, *_ in trainer.uploaded] == steps


def test_an_error_is_told_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Pushed(tmp_path)
    pushes = HubPushes(trainer)
    trainer.error = "no such step"
    for step in (5, 10):
        pushes.push(TrainerState(global_step=step))
        wait_for(trainer)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not pushed to the Hub (CheckpointError: no such step); training continues" in caplog.text
    trainer.error = ""
    pushes.push(TrainerState(global_step=15))
    wait_for(trainer)
    assert [step for step, *_ in trainer.uploaded] == [15] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("prepare", "wanted"),
    [
        (lambda trainer: None, True),
        (is_another_rank, False),
        (pushes_at_the_end, False),
        (pushes_nothing, False),
    ],
)
def test_who_pushes_checkpoints(prepare: Callable[[Pushed], None], wanted: bool, tmp_path: Path) -> None:
    trainer = Pushed(tmp_path)
    prepare(trainer)
    assert HubPushes(trainer).are_wanted is wanted


@pytest.mark.parametrize("committed", [True, False])
def test_what_was_resumed_from_is_pushed_if_it_is_committed(committed: bool, tmp_path: Path) -> None:
    trainer = Pushed(tmp_path)
    trainer.callback_handler.on_save = None
    trainer._manager.world_size = 1
    trainer.is_committed = lambda step: committed and step == 5  # type: ignore[attr-defined]
    CommitNotices(trainer).resumed(TrainerState(global_step=5))
    wait_for(trainer)
    assert [step for step, *_ in trainer.uploaded] == ([5] if committed else [])
