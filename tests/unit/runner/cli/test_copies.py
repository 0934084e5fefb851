"""`runner checkpoints copy`, `diff` and `export`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.small_checkpoint import network, write_checkpoint
from helpers.spread_checkpoint import COLUMNS, ROWS, STATE, commit_spread
from safetensors.torch import load_file
from unit.runner.cli.test_checkpoints import LOSSES, checkpoints, kept, run, stages

from checkpointing.commit.catalog import verify
from checkpointing.commit.kept import labels
from checkpointing.commit.tiers import TrainingStage
from checkpointing.storage import LocalStorage

__all__ = ["run", "stages"]  # fixtures


def test_one_checkpoint_or_all_of_them_are_copied(run: Path, tmp_path: Path) -> None:
    there = LocalStorage(tmp_path / "there")
    code, output = checkpoints("copy", run / "checkpoints" / "checkpoint-20", there.root)
    assert code == 0 and output == f"checkpoint-20: 3 files copied to {there.describe(20)}\n"
    code, output = checkpoints("copy", run, f"file://{there.root}")
    assert code == 0 and f"checkpoint-20: there already, and whole: {there.describe(20)}" in output
    assert there.steps() == sorted(LOSSES)
    assert all(verify(there, step).step == step for step in LOSSES)


def test_a_run_takes_copies_in(run: Path, tmp_path: Path) -> None:
    checkpoints("copy", run, tmp_path / "there")
    checkpoints("prune", run, "--keep-last", 1)
    assert checkpoints("copy", "there/checkpoint-10", run, cwd=tmp_path)[0] == 0
    assert checkpoints("copy", "checkpoint-30", run, cwd=tmp_path / "there")[0] == 0
    assert kept(run) == [10, 20, 30, 40]


def test_what_is_kept_is_kept_there_too(run: Path, tmp_path: Path) -> None:
    checkpoints("keep", run / "checkpoint-20", "--label", "best so far")
    checkpoints("copy", run, tmp_path / "there")
    place = LocalStorage(tmp_path / "there")
    assert labels(place, [place.read_manifest(step) for step in place.steps()]) == {20: "best so far"}


def test_later_stages_are_copied_too(stages: Path, tmp_path: Path) -> None:
    assert checkpoints("copy", stages, tmp_path / "there")[0] == 0
    code, output = checkpoints("list", tmp_path / "there")
    assert code == 0 and "stage-2-dpo:" in output
    assert LocalStorage(tmp_path / "there" / "stage-2-dpo").steps() == [40, 50]


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        ("run/checkpoint-7", "there", "there is no whole checkpoint-7 at run; see `runner checkpoints list`"),
        ("nowhere/checkpoint-7", "there", "'nowhere' is not a folder"),
        ("run", "", "the destination is empty"),
        ("run", "there/checkpoint-10", "names a checkpoint; name the folder or the URL that is to contain it"),
        ("run", "nonsense://there", "nonsense"),
    ],
)
def test_what_cannot_be_copied_is_said(run: Path, source: str, destination: str, reason: str) -> None:
    code, output = checkpoints("copy", source, destination, cwd=run.parent)
    assert code == 2 and reason in output and len(output.splitlines()) == 1, output


def test_another_run_with_the_same_step_is_not_overwritten(run: Path, stages: Path) -> None:
    code, output = checkpoints("copy", stages / "checkpoints" / "stage-2-dpo", run)
    assert code == 2 and "checkpoint-40 is another checkpoint (run run, attempt 1) and is kept" in output


def test_the_stages_of_another_run_are_left_as_they_are(stages: Path, tmp_path: Path) -> None:
    checkpoints("copy", stages, tmp_path / "there")
    place, other = LocalStorage(tmp_path / "there"), TrainingStage("stage-2-dpo", 2, 777).to_json()
    place.sidecars.write("stage-2-dpo.json", other)
    place.remove(20)
    code, output = checkpoints("copy", stages, place.root)
    assert code == 2 and "has another record of stage-2-dpo: it is of another run" in output
    assert place.sidecars.read("stage-2-dpo.json") == other and 20 not in place.steps()


def test_a_run_that_has_begun_there_does_not_get_another_ones(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    place = LocalStorage(tmp_path / "there")
    place.sidecars.write_restart_state(b'{"attempt": 1, "lineage": "other"}')
    code, output = checkpoints("copy", run, place.root)
    assert code == 2 and f"{place.root} is of another run (other), which would resume" in output
    assert place.steps() == []


def test_differences_are_printed_and_counted_by_the_exit_code(tmp_path: Path) -> None:
    training = network()
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, 10, training)
    assert checkpoints("diff", tmp_path / "a", tmp_path / "b") == (0, "")
    with torch.no_grad():
        training[0].bias.zero_()
    spread = LocalStorage(tmp_path / "spread")
    write_checkpoint(tmp_path / "b", 20, training)
    code, output = checkpoints("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and output.startswith("model.safetensors: bias: 3 of 3 elements differ, by "), output
    code, output = checkpoints("diff", tmp_path / "a" / "checkpoint-10", tmp_path / "b" / "checkpoint-20", "--json")
    assert code == 1 and json.loads(output)["num_different"] == 3
    assert checkpoints("diff", tmp_path / "b" / "checkpoint-10", tmp_path / "a")[0] == 0
    commit_spread(spread, 10, ROWS)
    code, output = checkpoints("diff", spread.root, tmp_path / "a")
    assert code == 1 and "model.safetensors: norm: removed (float32 [3])" in output


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    training = network()
    storage = write_checkpoint(tmp_path / "a", 10, training)
    with torch.no_grad():
        training[0].bias.zero_()
    write_checkpoint(tmp_path / "b", 10, training)
    code, output = checkpoints("diff", tmp_path / "a" / "checkpoint-9", tmp_path / "b")
    assert code == 2 and "there is no such checkpoint; committed steps: 10" in output
    path = storage.directory(10) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, output = checkpoints("diff", tmp_path / "a", tmp_path / "b")
    assert code == 2 and "model.safetensors was altered" in output


def test_a_model_is_exported_alone_also_out_of_shards(tmp_path: Path) -> None:
    commit_spread(LocalStorage(tmp_path / "spread"), 10, COLUMNS)
    arguments = ("--dtype", "bf16", "--max-shard-size", "40")
    code, output = checkpoints("export", tmp_path / "spread", 10, tmp_path / "out", *arguments)
    assert code == 0, output
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    found = load_file(tmp_path / "out" / names[0]) | load_file(tmp_path / "out" / names[1])
    assert found.keys() == STATE.keys()
    assert all(torch.equal(value, STATE[name].bfloat16()) for name, value in found.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "spread"]


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 10, network())
    code, output = checkpoints("export", tmp_path / "run", 10, tmp_path / "out", "--merge")
    assert code == 2 and output.endswith("there is no adapter to merge; leave --merge out\n"), output
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    code, output = checkpoints("export", tmp_path / "run", 10, tmp_path / "out", "--model-only")
    assert code == 0 and [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
