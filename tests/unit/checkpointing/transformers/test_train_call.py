"""Where a training starts, and what trackers call the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import TrainerState

from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.transformers.train_call import Start, choose_start

STATE = json.dumps(dataclasses.asdict(TrainerState(global_step=20, epoch=1.0))).encode()


def checkpoint(**loop_state: Any) -> LoadedCheckpoint:
    files = {"trainer_state.json": STATE, "loop_state_0.json": json.dumps(loop_state).encode()}
    return LoadedCheckpoint(
        "/runs/checkpoint-20",
        step=20,
        world_size=1,
        samples_consumed=80,
        files={name: memoryview(data) for name, data in files.items()},
        path=None,
        private=True,
    )


def restoring(point: LoadedCheckpoint | None = None, starting_folder: str | None = None, stage_name: str = "") -> Any:
    return Mock(starting_folder=starting_folder, stage_name=stage_name, choose=Mock(return_value=point))


def arguments(folder: Path, device: str = "cpu") -> Any:
    return SimpleNamespace(output_dir=str(folder), device=SimpleNamespace(type=device), process_index=0, world_size=1)


def stock(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def test_the_newest_checkpoint_of_the_run_is_resumed_whatever_the_script_asks_for(tmp_path: Path) -> None:
    manager = restoring(checkpoint(ended=True), str(tmp_path))
    start = choose_start(manager, arguments(tmp_path, "cuda"), "elsewhere")
    assert start.point is not None and start.step == 20
    manager.choose.assert_called_once_with(on_device=True)
    assert isinstance(start.folder, str) and Path(start.folder, "trainer_state.json").read_bytes() == STATE
    assert start.had_ended
    assert start.pending is start.point
    start.pending = None
    # Its loop has ended; that of the run which is resumed has not.
    assert not start.had_ended
    start.point.close()


KNOWN = {"training data": "2:ab"}


@pytest.mark.parametrize(
    ("max_steps", "ended", "job", "said"),
    [
        (21, False, KNOWN, None),
        (20, False, KNOWN, "at step 20 (/runs/checkpoint-20); no step is left. Other data needs another output_dir"),
        (15, False, KNOWN, "at step 20 (/runs/checkpoint-20); no step is left. Other"),
        (40, True, KNOWN, "at step 20, of 40: a callback had ended it (/runs/checkpoint-20); no step is left. Other"),
        (20, False, {"training data": None}, "no step is left. Whether it was on the same data is not known"),
        (20, False, {}, "Whether it was on the same data is not known"),
    ],
)
def test_a_training_that_had_finished_says_so(
    max_steps: int, ended: bool, job: dict[str, str | None], said: str | None, tmp_path: Path
) -> None:
    start = choose_start(restoring(checkpoint(ended=ended, job=job)), arguments(tmp_path), None)
    notice = start.finished_notice(max_steps, KNOWN)
    assert notice is None if said is None else said in (notice or "")


def test_a_training_without_checkpoints_has_not_finished() -> None:
    assert Start().finished_notice(0, KNOWN) is None


def test_a_checkpoint_that_the_trainer_could_not_read_is_refused(tmp_path: Path) -> None:
    point = checkpoint()
    point.files["trainer_state.json"] = memoryview(b"{}")
    with pytest.raises(InvalidCheckpoint, match="trainer_state"):
        choose_start(restoring(point), arguments(tmp_path), None)


def test_a_run_without_checkpoints_begins_afresh(tmp_path: Path) -> None:
    start = choose_start(restoring(), arguments(tmp_path), None)
    assert (start.point, start.folder, start.step, start.pending, start.had_ended) == (None, None, 0, None, False)


@pytest.mark.parametrize("asked_by", ["script", "user"])
def test_a_run_without_checkpoints_begins_with_another_ones(tmp_path: Path, asked_by: str) -> None:
    folder = str(stock(tmp_path, 7))
    manager, asked = (restoring(), folder) if asked_by == "script" else (restoring(starting_folder=folder), None)
    start = choose_start(manager, arguments(tmp_path / "new"), asked)
    assert (start.point, start.folder, start.step) == (None, folder, 7)


def test_true_is_the_newest_folder_of_a_stock_trainer(tmp_path: Path) -> None:
    stock(tmp_path, 7)
    newest = stock(tmp_path, 12)
    assert choose_start(restoring(), arguments(tmp_path), True).folder == str(newest)
    (tmp_path / "empty").mkdir()
    # The Trainer itself says that there is none.
    assert choose_start(restoring(), arguments(tmp_path / "empty"), True).folder is True


def test_a_supervisor_knows_the_runs_name(tmp_path: Path) -> None:
    first = choose_start(restoring(), arguments(tmp_path), None, "4f1c")
    again = choose_start(restoring(checkpoint(tracked_as="abc")), arguments(tmp_path), None, "4f1c")
    assert first.run_name == again.run_name and first.run_name.isalnum() and first.is_supervised
    stage = restoring(stage_name="stage-2")
    assert choose_start(stage, arguments(tmp_path), None, "4f1c").run_name != first.run_name


def test_without_a_supervisor_checkpoints_know_it(tmp_path: Path) -> None:
    names = {choose_start(restoring(), arguments(tmp_path), None).run_name for _ in range(2)}
    assert len(names) == 2
    start = choose_start(restoring(checkpoint(tracked_as="abc")), arguments(tmp_path), None)
    assert start.run_name == "abc" and not start.is_supervised
    assert choose_start(restoring(checkpoint(tracked_as="../x")), arguments(tmp_path), None).run_name.isalnum()


def test_a_stock_checkpoint_that_cannot_be_read_counts_no_steps(tmp_path: Path) -> None:
    assert [Start(folder=folder).step for folder in (None, True, str(tmp_path / "none"))] == [0, 0, 0]
