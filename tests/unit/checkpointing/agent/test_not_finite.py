"""A state with NaN or infinity is kept once, apart, for a post-mortem: the run does not count it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import STATE, Bench, save

from checkpointing.agent.events import NotFiniteKept, Pruned, SnapshotDropped, SnapshotTaken
from checkpointing.agent.scheduler import SnapshotContent
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers
from checkpointing.format.layout import NOT_FINITE_FOLDER
from checkpointing.format.manifest import Manifest, SnapshotInfo
from checkpointing.storage import LocalStorage, open_storage


def not_finite(bench: Bench, step: int, *, commit: bool = True) -> list[object]:
    """Rank 1 finds NaN in its share of a step's snapshot."""
    arena = bench.got(step)
    arena.view(0, len(STATE))[:] = STATE
    info = SnapshotInfo("run", 1, step, 2, step)
    content = SnapshotContent(info, [("file", 0, len(STATE))], commit)
    bench.scheduler.copied(arena.number, step, 0, 2, content)
    bench.scheduler.copied(arena.number, step, 1, 2, None, not_finite=("model['weight']",))
    return list(bench.settle())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(Tiers(open_storage(str(tmp_path / "run"))))
    bench.workers.current.begin_attempt(1, ())
    bench.workers.current.set_retention(Retention(1))
    bench.settle()
    bench.snapshot(4, commit=True)
    bench.settle()
    return bench


@pytest.mark.parametrize("commit", [False, True])
def test_it_is_kept_once_and_counts_for_nothing(bench: Bench, tmp_path: Path, commit: bool) -> None:
    results = not_finite(bench, 5, commit=commit)
    assert [one.where for one in results if isinstance(one, NotFiniteKept)] == [
        str(tmp_path / "run" / NOT_FINITE_FOLDER / "checkpoint-5")
    ]
    assert not any(isinstance(one, Pruned) for one in results)
    assert bench.tiers.catalog.committed_steps() == [4]
    assert any(isinstance(event, SnapshotDropped) and event.step == 5 for event in bench.events)
    assert not any(isinstance(event, SnapshotTaken) and event.step == 5 for event in bench.events)
    # A rank that waits for its commit waits until its attempt ends; and it is not resumed from in memory.
    assert 5 not in bench.scheduler.outcomes
    newest = bench.pool.newest("")
    assert newest is not None and newest.step == 4
    results = not_finite(bench, 6)
    assert not any(isinstance(one, NotFiniteKept) for one in results)
    assert open_storage(str(tmp_path / "run" / NOT_FINITE_FOLDER)).steps() == [5]
    # Nothing is left of them in memory.
    assert all(arena.step == 4 or arena.state.name == "FREE" for arena in bench.pool.arenas)


def test_its_manifest_marks_it(bench: Bench, tmp_path: Path) -> None:
    not_finite(bench, 5)
    kept = open_storage(str(tmp_path / "run" / NOT_FINITE_FOLDER))
    manifest = kept.read_manifest(5)
    assert manifest.not_finite == ("model['weight']",)
    assert Manifest.from_json(manifest.to_json(), "here") == manifest
    # A copy among the run's checkpoints is none of them, and does not have others removed.
    shutil.copytree(tmp_path / "run" / NOT_FINITE_FOLDER / "checkpoint-5", tmp_path / "run" / "checkpoint-5")
    assert Catalog(bench.tiers.durable).committed_steps() == [4]
    problem = next(entry.problem for entry in bench.tiers.catalog.scan() if entry.step == 5)
    assert problem is not None and "post-mortem" in problem and "model['weight']" in problem
    bench.workers.current.prune()
    bench.settle()
    assert bench.tiers.catalog.committed_steps() == [4]


def test_manifests_of_finite_states_are_as_they_were(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    save(storage, 3)
    assert b"not_finite" not in storage.read_manifest(3).to_json()


def test_it_is_no_loss_where_it_cannot_be_kept(bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run" / NOT_FINITE_FOLDER).write_text("in the way")
    with caplog.at_level(logging.WARNING):
        results = not_finite(bench, 5)
    assert "could not be kept" in caplog.text
    assert not any(isinstance(one, NotFiniteKept) for one in results)
    assert bench.tiers.catalog.committed_steps() == [4] and bench.pool.newest("") is not None


def test_a_node_that_does_not_write_keeps_none(tmp_path: Path) -> None:
    bench = Bench(Tiers(open_storage(str(tmp_path / "run"))), commits=False)
    not_finite(bench, 5)
    assert not (tmp_path / "run" / NOT_FINITE_FOLDER).exists()


def test_it_does_not_take_the_room_of_checkpoints(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda storage: 2 * len(STATE))
    with caplog.at_level(logging.WARNING):
        not_finite(bench, 5)
    assert "bytes are free" in caplog.text
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda storage: 3 * len(STATE))
    # What a try that was cut off has left is removed.
    left = tmp_path / "run" / NOT_FINITE_FOLDER / ".checkpoint-5.1.tmp"
    left.mkdir(exist_ok=True)
    (tmp_path / "run" / NOT_FINITE_FOLDER / ".fence.json").unlink(missing_ok=True)
    not_finite(bench, 6)
    assert not left.exists() and open_storage(str(tmp_path / "run" / NOT_FINITE_FOLDER)).steps() == [6]


def test_it_is_not_written_where_the_run_s_folder_is_gone(bench: Bench, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run")
    not_finite(bench, 5)
    assert not (tmp_path / "run").exists()
