"""Journals, checkpoints and configurations of an earlier version are read, and mean what they meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.old_runs import ANSWERS, unpack

from runner.cli.main import cli
from runner.config.load import load_config
from runner.recovery.kinds import FailureKind
from runner.recovery.restart_state import RestartState

# Words of an answer that have changed since.
RENAMED = {
    "rendezvous": "launch",
    "waiting for a machine": "not running",
    "set_aside": "quarantined",
    "machine_share": "node_loss_share",
    "machine_wait_s": "node_wait_s",
}
# Texts that are not in the journal, but made by its reader.
REWORDED = {"its runner was killed, or its machine was lost": "its runner was killed, or its node was lost"}


def runner(*arguments: str | Path) -> str:
    """Run a command in this process: starting an interpreter for each would cost a second."""
    result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def assert_same(answer: Any, before: Any) -> None:
    """Assert that an answer holds everything that the old version's did, under its new name."""
    match before:
        case dict():
            for key, value in before.items():
                name = key if key in answer else RENAMED.get(key, key)
                assert name in answer, f"{key} is missing"
                assert_same(answer[name], value)
        case list():
            assert len(answer) == len(before)
            for item, old in zip(answer, before, strict=True):
                assert_same(item, old)
        case _:
            assert answer in (before, REWORDED.get(before))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("old-runs"))


@pytest.mark.parametrize("name", ["preempted", "failed"])
def test_status_answers_what_the_old_version_answered(name: str, runs: Path) -> None:
    """Summary and ledger: every attempt with its end and cause, every second of the run."""
    assert_same(json.loads(runner("status", runs / name, "--json")), ANSWERS[name]["status"])


def test_the_copy_of_the_journal_beside_the_checkpoints_is_read(runs: Path) -> None:
    answer = json.loads(runner("status", runs / "failed-checkpoints", "--json"))
    before = ANSWERS["failed"]["status"]
    assert_same(answer["attempts"], before["attempts"])
    assert answer["goodput"] == before["goodput"]


def test_the_failures_are_told_apart(runs: Path) -> None:
    text = runner("status", runs / "failed")
    for part in ("out of memory", "non-finite gradients", "hung", "crashed", "cut off", "finished"):
        assert part in text


@pytest.mark.parametrize("name", ["preempted", "failed"])
def test_simulate_learns_the_same_figures(name: str, runs: Path) -> None:
    answer = json.loads(runner("simulate", "--from", runs / name, "--runs", "20", "--json"))
    assert_same(answer["scenario"], ANSWERS[name]["scenario"])


@pytest.mark.parametrize("name", ["preempted", "failed"])
def test_the_report_shows_each_attempt(name: str, runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    runner("report", runs / name, "--output", path)
    page = path.read_text()
    for attempt in ANSWERS[name]["status"]["attempts"]:
        # A cause may be shortened, and is escaped.
        assert attempt["cause"][:20] in page, attempt


def test_checkpoints_are_listed_verified_and_exported(runs: Path, tmp_path: Path) -> None:
    listed = runner("checkpoints", "list", runs / "preempted")
    assert " 40 " in listed and " 30 " in listed and listed.count("sizes ok") == 2
    assert runner("checkpoints", "verify", runs / "preempted").count(" ok ") == 2
    runner("checkpoints", "export", runs / "preempted", "40", tmp_path / "exported")
    source = runs / "preempted" / "checkpoints" / "checkpoint-40" / "model.safetensors"
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == source.read_bytes()


def test_damage_to_an_old_checkpoint_is_found(runs: Path, tmp_path: Path) -> None:
    """Its digests are compared, not passed over."""
    copy = tmp_path / "run"
    shutil.copytree(runs / "preempted", copy)
    path = copy / "checkpoints" / "checkpoint-40" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = CliRunner().invoke(cli, ["checkpoints", "verify", str(copy)])
    assert result.exit_code != 0 and "model.safetensors" in result.output


@pytest.mark.parametrize("name", ["preempted", "failed"])
def test_the_saved_configuration_loads(name: str, runs: Path) -> None:
    """The configuration that a run saved holds every key that its version knew."""
    config = load_config(str(runs / name / "config.yaml"), {}, [])
    assert config.restart.hang_timeout_s == {"preempted": 30, "failed": 6}[name]
    assert load_config(str(runs / "job.yaml"), {}, []).checkpoint.snapshot_steps == 5


def test_the_restart_state_is_read(runs: Path) -> None:
    """Losing it would reset the restart budget and the count of recomputed steps."""
    state = RestartState.from_json((runs / "preempted" / "checkpoints" / ".runner.json").read_bytes())
    (record,) = state.history
    assert (record.failure.kind, record.failure.step, record.committed_step) == (FailureKind.CRASHED, 24, 20)
    assert (state.reached, state.lost_steps, state.batch.micro_batch) == (40, 4, 2)
    assert state.lineage == ANSWERS["preempted"]["status"]["run_id"]
