"""What a training asks of the places of its checkpoints, and what is restored from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import network, snapshot, write_checkpoint
from unit.checkpointing.doubles import Connection, manager, options

from checkpointing.commit.tiers import TrainingStage
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import RankSettings
from checkpointing.host.heartbeat import Phase
from checkpointing.manager.manager import CheckpointManager


def training(folder: Path, connection: Connection | None = None, **settings: Any) -> CheckpointManager:
    """A training of a model that is not the saved one yet."""
    connection = connection or Connection(folder)
    made = manager(options(folder, RankSettings(**settings)), connection)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    made.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.5))
    return made


def test_the_agent_is_reached_when_it_is_needed_and_once(tmp_path: Path) -> None:
    connection = Connection(tmp_path)
    own = training(tmp_path, connection)
    assert connection.num_connected == 0 and not own._node.is_connected
    assert own.restoring.folder_of(7) == f"{tmp_path}/checkpoint-7" and own.scratch == tmp_path
    assert connection.num_connected == 1 and own._node.is_connected


def test_the_newest_checkpoint_is_restored(tmp_path: Path) -> None:
    model, optimizer = network()
    write_checkpoint(tmp_path, 10, (model, optimizer))
    connection = Connection(tmp_path)
    own = training(tmp_path, connection)
    point = own.restoring.choose()
    assert point is not None and point.step == 10
    assert connection.client.beat.phase is Phase.RESTORING
    own.restoring.restore_model(point)
    own.restoring.restore_optimizer(point)
    state: Any = own._tracked.state
    assert torch.equal(state.model.weight, model.weight) and state.optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_of_a_model_on_the_cpu_is_the_ranks_own(tmp_path: Path) -> None:
    """On an accelerator it is copied from memory that all ranks share; the caller may say where the model will be."""
    write_checkpoint(tmp_path, 10, network())
    found = {on_device: training(tmp_path).restoring.choose(on_device=on_device) for on_device in (None, True, False)}
    assert {on_device: point and point.private for on_device, point in found.items()} == {
        None: True,
        True: False,
        False: True,
    }


def test_a_snapshot_in_memory_is_newer_than_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, network())
    point = training(tmp_path, Connection(tmp_path, snapshot(12, network()))).restoring.choose()
    assert point is not None and point.step == 12


def test_without_a_checkpoint_training_starts_from_the_beginning(tmp_path: Path) -> None:
    own = training(tmp_path)
    assert own.restoring.choose() is None and own.restoring.starting_point() is None


def test_another_runs_checkpoint_is_for_the_first_training_only(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    write_checkpoint(folder, 10, network())
    source = str(folder / "checkpoint-10")
    first = training(tmp_path, resume_from=source)
    assert first.restoring.starting_folder == source and first.restoring.stage_name == ""
    point = first.restoring.starting_point()
    assert point is not None and point.step == 10
    later = training(tmp_path, Connection(tmp_path, stage=TrainingStage("stage-2", 2, 10)), resume_from=source)
    assert (
        later.restoring.starting_folder is None
        and later.restoring.starting_point() is None
        and later.restoring.stage_name == "stage-2"
    )


def test_a_commit_that_cannot_be_looked_up_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = write_checkpoint(tmp_path, 10, network())
    own = training(tmp_path)
    assert own.restoring.is_committed(10) and not own.restoring.is_committed(11)

    def refuse(self: object) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(storage), "survey", refuse)
    assert not own.restoring.is_committed(10)


def test_foreign_checkpoints_ahead_are_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    own = training(tmp_path)
    own.restoring.check_way(20)
    with pytest.raises(CheckpointError, match="checkpoint-20"):
        own.restoring.check_way(10)


def test_a_checkpoint_is_exported_from_wherever_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 10, network())
    restoring = training(tmp_path / "run").restoring
    restoring.export(10, tmp_path / "out")
    assert {"model.safetensors", "optimizer.pt"} <= {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match="checkpoint-11 cannot be read: it was removed"):
        restoring.export(11, tmp_path / "other")
