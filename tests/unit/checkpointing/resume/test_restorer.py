"""Loading a chosen state, and the best model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import Agent, network, write_checkpoint
from helpers.thread_ranks import run_ranks

from checkpointing.commit import reading
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.format.layout import MODEL_NAME, OPTIMIZER_NAME
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.process.ranks import Ranks
from checkpointing.resume import verified_read
from checkpointing.resume.restorer import Restorer, check_nothing_in_the_way, placer, restore_generators
from checkpointing.state.kinds.pipeline import PipelineState
from checkpointing.state.train_state import TrainState


def restorer(folder: Path, ranks: Ranks | None = None, *, supervised: bool = False) -> Restorer:
    agent: Any = Agent(folder)
    return Restorer(open_tiers(str(folder)), agent, ranks or Ranks(), "auto", supervised=supervised)


def blank() -> tuple[torch.nn.Linear, TrainState]:
    model = torch.nn.Linear(4, 3)
    return model, TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.5))


def test_everything_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = network()
    write_checkpoint(tmp_path, 10, training)
    draws = [random.random(), float(torch.rand(()))]
    own = restorer(tmp_path)
    point = own.choose(private=True)
    assert point is not None and "resumed from step 10" in capsys.readouterr().err
    model, state = blank()
    own.load_model(state, point)
    own.load_optimizer(state, point)
    restore_generators(point, 0, 1)
    assert torch.equal(model.weight, training[0].weight) and own.seconds > 0
    assert state.optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    assert [random.random(), float(torch.rand(()))] == draws


def test_under_a_supervisor_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 10, network())
    assert restorer(tmp_path, supervised=True).choose(private=True) is not None
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_new_continues_with_the_first_ones_generators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with its seed: ranks that share layers must draw the same."""
    write_checkpoint(tmp_path, 10, network())
    draws = []
    for rank, world_size in ((0, 1), (1, 2)):
        point = restorer(tmp_path).choose(private=True)
        assert point is not None
        torch.manual_seed(rank)
        restore_generators(point, rank, world_size)
        draws.append((random.random(), float(torch.rand(()))))
    assert draws[0] == draws[1] and caplog.text.count("holds no generator state of rank 1 (it has that of 1)") == 1


@pytest.mark.parametrize(("rank", "world_size", "is_exact"), [(0, 2, False), (1, 2, True)])
def test_generators_that_nothing_depends_on_are_not_missed(
    rank: int,
    world_size: int,
    is_exact: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's of a single rank have another name; with virtual ranks, each of these has its own."""
    write_checkpoint(tmp_path, 10, network())
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(is_exact=is_exact).to_json())
    point = restorer(tmp_path).choose(private=True)
    assert point is not None
    restore_generators(point, rank, world_size)
    assert "generator" not in caplog.text


def test_another_runs_checkpoint_must_be_of_this_library(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, network())
    own = restorer(tmp_path)
    assert own.starting_point(str(tmp_path / "checkpoint-10"), private=True).step == 10
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of this library"):
        own.starting_point(str(tmp_path / "checkpoint-20"), private=True)


def evaluated(folder: Path) -> None:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        training = network()
        with torch.no_grad():
            training[0].weight.fill_(step)
        write_checkpoint(folder, step, training, eval_loss=loss)


@pytest.mark.parametrize(
    ("damaged", "last_step", "preferred", "best"),
    [(None, 30, None, 20), (20, 40, None, 30), (20, 30, None, 30), (None, 30, 10, 10), (10, 30, 10, 20)],
)
def test_the_best_model_that_can_be_read_is_loaded(
    damaged: int | None, last_step: int, preferred: int | None, best: int, tmp_path: Path
) -> None:
    evaluated(tmp_path)
    if damaged is not None:
        (tmp_path / f"checkpoint-{damaged}" / MODEL_NAME).write_bytes(b"")
    states = [blank() for _ in range(2)]

    def load(ranks: Ranks) -> int | None:
        _, state = states[ranks.rank]
        retention = Retention(best_metric="eval_loss")
        own = restorer(tmp_path, ranks)
        return own.load_best(state, retention, last_step, together=True, preferred=preferred)

    assert run_ranks(load) == [best, best]
    # The weights of the last step are in the model already.
    expected = best if best != last_step else None
    assert all(expected is None or bool((model.weight == expected).all()) for model, _ in states)


def test_what_one_rank_cannot_read_is_loaded_by_none(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        evaluated(folder)
    (folders[1] / "checkpoint-20" / MODEL_NAME).write_bytes(b"")
    states = [blank() for _ in range(2)]

    def load(ranks: Ranks) -> int | None:
        own = restorer(folders[ranks.rank], ranks)
        retention = Retention(best_metric="eval_loss")
        return own.load_best(states[ranks.rank][1], retention, 40, together=True, preferred=None)

    assert run_ranks(load) == [30, 30]
    assert all(bool((model.weight == 30).all()) for model, _ in states)


def test_all_ranks_learn_that_the_best_checkpoint_cannot_be_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(tmp_path)

    def stale(_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("checkpointing.storage.local.LocalStorage._names", stale)

    def load(ranks: Ranks) -> int | None:
        own, retention = restorer(tmp_path, ranks), Retention(best_metric="eval_loss")
        return own.load_best(blank()[1], retention, 40, together=True, preferred=None)

    found = run_ranks(load)
    assert [type(one) for one in found] == [StorageUnreachable] * 2 and "Stale file handle" in str(found[1])


def test_of_the_best_checkpoint_the_optimizer_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is twice as large as the model, and every rank would have it in memory."""
    evaluated(tmp_path)
    opened, read_shared = list[str](), reading.read_shared

    def counted(source: object, algorithm: str | None) -> object:
        opened.append(Path(str(source)).name)
        return read_shared(source, algorithm)  # type: ignore[arg-type]

    monkeypatch.setattr(verified_read, "read_shared", counted)
    monkeypatch.setattr(verified_read, "read_private", lambda *_: pytest.fail("it is copied"))
    best = restorer(tmp_path).load_best(
        blank()[1], Retention(best_metric="eval_loss"), 40, together=False, preferred=None
    )
    assert best == 20 and MODEL_NAME in opened and OPTIMIZER_NAME not in opened


def test_without_the_metric_there_is_no_best_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, network())
    found = restorer(tmp_path).load_best(blank()[1], Retention(best_metric="x"), 10, together=False, preferred=None)
    assert found is None


def test_another_writers_checkpoints_are_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / MODEL_NAME).write_bytes(b"weights")
    (folder / "trainer_state.json").write_text("{}")
    check_nothing_in_the_way(open_tiers(str(tmp_path)), 20)
    with pytest.raises(CheckpointError, match=r"not written \(checkpoint-20\): they are left as they are"):
        check_nothing_in_the_way(open_tiers(str(tmp_path)), 10)


@pytest.mark.parametrize("is_stage", [False, True])
def test_only_what_all_ranks_load_alike_is_shared_out(is_stage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sends a part of what it has loaded, by its place: a stage would get another one's moments."""
    monkeypatch.setattr(Ranks, "can_share_copies", lambda *_: True)
    monkeypatch.setattr(Ranks, "to_device", lambda *_: "shared out")
    model, state = blank()
    if is_stage:
        kind = PipelineState(model, state.optimizer, Ranks())
        state = TrainState(model, state.optimizer, held_as=kind)
    assert placer(state, Ranks())("own") == ("own" if is_stage else "shared out")
