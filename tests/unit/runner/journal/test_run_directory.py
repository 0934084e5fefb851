from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from runner.errors import RunBusy, RunnerError, UsageError
from runner.journal import run_directory
from runner.journal.run_directory import RunDirectory


def test_the_identity_is_made_once_and_shared_by_all_nodes(tmp_path: Path) -> None:
    first, second = RunDirectory(str(tmp_path)), RunDirectory(str(tmp_path), node_rank=1)
    first.create()
    assert first.run_id() == first.run_id() == second.run_id()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.json"]


@pytest.mark.parametrize(
    "damaged", ["{", "[" * 3000, '{"run_id": null}', '{"run_id": ""}', '{"run_id": "../x"}', '{"run_id": "\\ud800"}']
)
def test_a_damaged_identity_is_told(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(damaged)
    with pytest.raises(UsageError, match=r"run\.json is damaged; delete it"):
        RunDirectory(str(tmp_path)).run_id()


def test_one_runner_at_a_time_but_one_per_node(tmp_path: Path) -> None:
    first = RunDirectory(str(tmp_path))
    first.create()
    first.lock()
    with pytest.raises(RunBusy, match=r"another runner \(pid \d+ on .*\) works on"):
        RunDirectory(str(tmp_path)).lock()
    other_node = RunDirectory(str(tmp_path), node_rank=1)
    other_node.create()
    other_node.lock()


def test_an_earlier_run_is_moved_aside_whole(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    directory.create()
    old = directory.run_id()
    directory.journal.write_text("{}\n")
    (tmp_path / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    for number in (1, 2):
        aside = Path(directory.move_aside([tmp_path / "checkpoints"]))
        assert aside == tmp_path / f"previous-{number}"
    kept = tmp_path / "previous-1"
    assert (kept / "journal.jsonl").exists() and (kept / "checkpoints" / "checkpoint-5").is_dir()
    assert directory.run_id() != old and not directory.journal.exists() and directory.logs.is_dir()


def test_a_lock_of_another_machine_is_waited_for_and_left_to_the_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_PATIENCE_S", 0.5)
    first, second = RunDirectory(str(tmp_path)), RunDirectory(str(tmp_path))
    first.create()
    first.lock()
    (tmp_path / ".runner.lock").write_text("pid 7 on another-machine\n")
    told: list[str] = []
    began = time.monotonic()
    second.lock(told.append)
    assert time.monotonic() - began >= 0.5
    assert "another-machine" in told[0] and "continuing" in told[1]


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 74), (errno.ENOSPC, 74), (errno.EACCES, 2)])
def test_a_file_system_that_does_not_work_is_no_mistake(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 2, Kubernetes would give the run up for good."""
    directory = RunDirectory(str(tmp_path))
    directory.create()

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_directory, "hold_lock", refused)
    with pytest.raises(RunnerError, match=f"cannot be written: {os.strerror(number)}") as caught:
        directory.lock()
    assert caught.value.exit_code == code and ("start again" in str(caught.value)) == (code == 74)
    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(RunnerError, match=f"cannot be used: {os.strerror(number)}") as caught:
        directory.create()
    assert caught.value.exit_code == code


def test_logs_of_attempts_long_ago_are_removed_but_those_of_the_first(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    directory.create()
    for number in (1, 2, 50, 51, 149):
        (directory.logs / f"attempt-{number}" / "0").mkdir(parents=True)
    (directory.logs / "launcher.log").touch()
    directory.remove_old_logs(150)
    assert {path.name for path in directory.logs.iterdir()} == {
        "attempt-1",
        "attempt-51",
        "attempt-149",
        "launcher.log",
    }
