"""`runner checkpoints`, as a user types it, on a run's folder: also one that was copied, renamed or damaged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.command_line import run_command

from checkpointing.commit import catalog
from checkpointing.commit.catalog import verify
from checkpointing.commit.kept import keep, kept_steps
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.tiers import TrainingStage
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import Manifest, SnapshotInfo
from checkpointing.host import locking
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.sidecars import LocalSidecars

LOSSES = {10: 1.0, 20: 0.1, 30: 2.0, 40: 1.5}


def checkpoints(*arguments: object, cwd: Path | None = None) -> tuple[int, str]:
    done = run_command("checkpoints", *map(str, arguments), cwd=cwd)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"output_dir: {folder}\ndata:\n  path: /gone/data.parquet\ntrainer:\n  metric_for_best_model: loss\n"
    )
    (folder / "journal.jsonl").touch()
    for step, loss in LOSSES.items():
        data = b"state" * step
        names = ("model.safetensors", "optimizer.pt", "rng_state.pth")
        files = [StagedFile(name, [memoryview(data)], partial(digest_buffer, data)) for name in names]
        info = SnapshotInfo("run", 1, step, 1, step, {"eval_loss": loss})
        commit_snapshot(LocalStorage(folder / "checkpoints"), info, files)
    return folder


def kept(folder: Path) -> list[int]:
    return LocalStorage(folder / "checkpoints").steps()


def damage(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"stale" * step)


def test_pruning_keeps_the_newest_and_the_best(run: Path) -> None:
    code, output = checkpoints("prune", run, "--keep-last", 1)
    assert code == 0 and output.count("removed") == 2
    assert kept(run) == [20, 40]


def test_what_is_kept_is_listed_and_never_pruned(run: Path) -> None:
    code, output = checkpoints("keep", run / "checkpoint-10", "--label", "before the spike\x1b[2J")
    assert code == 0 and output == f"checkpoint-10 at {run}/checkpoints is kept: before the spike\\x1b[2J\n"
    assert checkpoints("keep", run)[0] == 0
    lines = checkpoints("list", run)[1].splitlines()
    assert lines[1].endswith("sizes ok (attempt 1), kept")
    assert lines[4].endswith("sizes ok (attempt 1), kept: before the spike\\x1b[2J")
    assert checkpoints("prune", run, "--keep-last", 1)[0] == 0
    assert kept(run) == [10, 20, 40]
    assert checkpoints("unkeep", run / "checkpoint-10")[1] == (
        f"checkpoint-10 at {run}/checkpoints is left to retention\n"
    )
    assert "was not kept" in checkpoints("unkeep", run / "checkpoint-10")[1]
    assert kept_steps(LocalStorage(run / "checkpoints")) == {40}


def test_both_tiers_keep_what_they_have(run: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with (run / "config.yaml").open("a") as file:
        file.write(f"checkpoint:\n  local_tier: {local}\n")
    checkpoints("copy", run / "checkpoints" / "checkpoint-30", local)
    assert checkpoints("keep", run / "checkpoint-10")[0] == checkpoints("keep", run / "checkpoint-30")[0] == 0
    tiers = [LocalStorage(run / "checkpoints"), LocalStorage(local)]
    assert [kept_steps(storage) for storage in tiers] == [{10, 30}, {30}]
    assert checkpoints("unkeep", run / "checkpoint-30")[0] == 0
    assert [kept_steps(storage) for storage in tiers] == [{10}, set()]


def test_the_next_checkpoint_of_a_step_is_not_kept(run: Path) -> None:
    """As after a run has gone back; what was kept is another one, and can be left to retention without it."""
    place = LocalStorage(run / "checkpoints")
    assert checkpoints("keep", run / "checkpoint-10", "--label", "mine")[0] == 0
    other = replace(place.read_manifest(10), attempt=2)
    (place.root / "checkpoint-10" / "manifest.json").write_bytes(other.to_json())
    assert "kept" not in checkpoints("list", run)[1]
    assert checkpoints("prune", run, "--keep-last", 1)[0] == 0 and kept(run) == [20, 40]
    assert "is left to retention" in checkpoints("unkeep", run / "checkpoint-10")[1]
    assert kept_steps(place) == set()
    assert "there is no such checkpoint" in checkpoints("unkeep", run / "checkpoint-10")[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("run/checkpoint-7",), "there is no such checkpoint; committed steps: 10, 20, 30, 40"),
        (("run", "--label", "x" * 201), "--label: write at most 200 characters, in one line"),
        (("run", "--label", "a\nb"), "--label: write at most 200 characters, in one line"),
    ],
)
def test_what_cannot_be_kept_is_said(run: Path, arguments: tuple[str, ...], reason: str) -> None:
    code, output = checkpoints("keep", *arguments, cwd=run.parent)
    assert code == 2 and reason in output and len(output.splitlines()) == 1, output
    assert kept_steps(LocalStorage(run / "checkpoints")) == set()


def test_what_is_pruned_meanwhile_is_not_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalStorage(run / "checkpoints")
    write = LocalSidecars.write

    def pruned(self: LocalSidecars, name: str, data: bytes) -> None:
        write(self, name, data)
        place.remove(10)

    monkeypatch.setattr(LocalSidecars, "write", pruned)
    code, output = checkpoints("keep", run / "checkpoint-10")
    assert code == 2 and "was removed meanwhile; keep another one" in output
    assert kept_steps(place) == set()


def test_what_is_kept_while_prune_reads_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(storage: Storage, step: int) -> Manifest:
        keep(storage, storage.read_manifest(10))
        return verify(storage, step)

    monkeypatch.setattr(catalog, "verify", read)
    assert checkpoints("prune", run, "--keep-last", 1)[0] == 0
    assert kept(run) == [10, 20, 40]


def test_several_best_ones_stay(run: Path) -> None:
    assert checkpoints("prune", run, "--keep-last", 1, "--keep-best", 2)[0] == 0
    assert kept(run) == [10, 20, 40]


def test_pruning_never_removes_the_newest_that_is_whole(run: Path) -> None:
    damage(run, 40)
    damage(run, 20)
    code, output = checkpoints("prune", run, "--keep-last", 1)
    assert code == 0 and "damaged, kept" in output and "digest" in output
    assert kept(run) == [20, 30, 40]


def test_a_copy_is_pruned_for_itself(run: Path) -> None:
    copy = run.with_name("copy")
    shutil.copytree(run, copy)
    assert checkpoints("prune", copy, "--keep-last", 1)[0] == 0
    assert kept(run) == sorted(LOSSES) and kept(copy) == [20, 40]


def test_a_renamed_run_is_found_also_by_a_url(run: Path) -> None:
    moved = run.rename(run.with_name("moved"))
    for name in (moved, f"file://{moved}"):
        code, output = checkpoints("list", name)
        assert code == 0 and len(output.splitlines()) == 1 + len(LOSSES), output
    assert checkpoints("verify", moved)[0] == 0
    newest = max(moved.rglob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    code, output = checkpoints("verify", newest)
    assert code == 0 and len(output.splitlines()) == 1 and "ok" in output


def test_a_run_that_lives_prunes_by_itself(run: Path) -> None:
    fd = locking.open_lock(run / ".runner.lock")
    assert locking.try_lock(fd)
    code, output = checkpoints("prune", run, "--keep-last", 1)
    assert code == 2 and "another runner" in output
    assert kept(run) == sorted(LOSSES)


@pytest.mark.parametrize("place", ["", "file://relative/run", "file:///nonexistent/run", "/nonexistent/run"])
def test_places_that_cannot_be(place: str) -> None:
    for command in (["list", place], ["prune", place, "--keep-last", "1"]):
        code, output = checkpoints(*command)
        assert code == 2 and len(output.splitlines()) == 1, output


def test_export_into_the_current_directory_is_refused(run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in (".", "", "../empty"):
        code, output = checkpoints("export", run, 10, name, cwd=empty)
        assert code == 2 and "current directory" in output, output
    assert checkpoints("export", run, 10, "new", cwd=empty)[0] == 0


@pytest.fixture
def stages(run: Path) -> Path:
    """A run of two stages, both of which have a checkpoint of step 40."""
    place = LocalStorage(run / "checkpoints")
    stage = TrainingStage("stage-2-dpo", 2, 40)
    place.sidecars.write(f"{stage.name}.json", stage.to_json())
    for step in (40, 50):
        data = b"other" * step
        names = ("model.safetensors", "optimizer.pt", "rng_state.pth")
        files = [StagedFile(name, [memoryview(data)], partial(digest_buffer, data)) for name in names]
        commit_snapshot(LocalStorage(place.root / stage.name), SnapshotInfo("run", 1, step, 1, step, {}), files)
    return run


@pytest.mark.parametrize("name", ["checkpoint-9", "checkpoint-10/out"])
def test_export_among_the_checkpoints_is_refused(name: str, run: Path) -> None:
    code, output = checkpoints("export", run, 10, run / "checkpoints" / name)
    assert code == 2 and "is among the run's checkpoints; choose another directory" in output
    assert not (run / "checkpoints" / name).exists()
    assert checkpoints("export", run, 10, run / "exported")[0] == 0


def test_a_later_stage_is_exported_and_pruned_too(stages: Path, tmp_path: Path) -> None:
    code, output = checkpoints("export", stages, 50, tmp_path / "out")
    assert code == 0 and "checkpoint-50: 3 files, 0.0 MB" in output
    assert (tmp_path / "out" / "optimizer.pt").read_bytes() == b"other" * 50
    assert checkpoints("export", stages, 10, tmp_path / "first")[0] == 0

    code, output = checkpoints("export", stages, 40, tmp_path / "both")
    assert code == 2 and f"several stages have a checkpoint-40: name one in {stages}" in output
    assert "/checkpoints/stage-2-dpo" in output and not (tmp_path / "both").exists()
    assert checkpoints("export", stages / "checkpoints" / "stage-2-dpo", 40, tmp_path / "both")[0] == 0

    assert checkpoints("prune", stages, "--keep-last", 1)[0] == 0
    assert kept(stages) == [20, 40]
    assert LocalStorage(stages / "checkpoints" / "stage-2-dpo").steps() == [50]


def test_another_programs_checkpoint_is_not_called_damaged(run: Path) -> None:
    foreign = run / "checkpoints" / "checkpoint-99"
    foreign.mkdir()
    (foreign / "trainer_state.json").write_text("{}")
    code, output = checkpoints("verify", run)
    assert code == 0 and "foreign" in output and "INVALID" not in output, output


def test_what_was_set_aside_and_is_whole_gets_its_place_back(run: Path) -> None:
    storage = LocalStorage(run / "checkpoints")
    for step in (30, 40):
        storage.quarantine(step)
    (run / "checkpoints" / "checkpoint-30.invalid" / "model.safetensors").write_bytes(b"stale" * 30)
    code, output = checkpoints("verify", run)
    assert code == 0 and "40  local   back" in output and "it was quarantined, and is whole" in output
    assert kept(run) == [10, 20, 40] and storage.quarantined() == ["checkpoint-30.invalid"]


def test_one_that_training_has_gone_on_without_stays_aside(run: Path) -> None:
    storage = LocalStorage(run / "checkpoints")
    storage.quarantine(40)
    data = b"state"
    names = ("model.safetensors", "optimizer.pt", "rng_state.pth")
    files = [StagedFile(name, [memoryview(data)], partial(digest_buffer, data)) for name in names]
    commit_snapshot(storage, SnapshotInfo("run", 2, 35, 1, 35), files)
    code, output = checkpoints("verify", run)
    assert code == 0 and "attempt 2 has gone on without it" in output
    assert kept(run) == [10, 20, 30, 35] and storage.quarantined() == ["checkpoint-40.invalid"]
