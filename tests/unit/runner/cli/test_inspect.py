"""`runner config`, `status` and `report`: which run is meant, and what is printed of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from helpers.journals import event

from runner.cli import inspect as module
from runner.cli.inspect import config, entries_at, report, status
from runner.errors import UsageError
from runner.journal.journal import Journal


def run(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def write_run(folder: Path, run_id: str = "r", *, ended: bool = False, written: float | None = None) -> Journal:
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.jsonl", time.time)
    journal.append(event("run_started", run_id=run_id, committed_step=-1), 0)
    journal.append(event("training_started", step=0, total_steps=10), 1)
    journal.append(event("log", step=4, loss=0.5), 1)
    if ended:
        end(journal)
    if written is not None:
        os.utime(folder / "journal.jsonl", (written, written))
    return journal


def end(journal: Journal) -> None:
    journal.append(event("run_ended", state="finished", exit_code=0, reason="all is done"), 1)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_DIR", raising=False)


# -- config --------------------------------------------------------------------------------------------------------


def test_the_configuration_is_printed_as_yaml_that_reads_back(tmp_path: Path) -> None:
    result = run(config, "--nproc-per-node", "4", "--set", "trainer.max_length=64")
    body = yaml.safe_load(result.output)
    assert body["launch"]["nproc_per_node"] == 4 and body["trainer"]["max_length"] == 64
    (tmp_path / "again.yaml").write_text(result.output)
    assert run(config, "--config", "again.yaml").output == result.output


def test_options_of_the_trainer_are_listed_but_for_reserved_ones() -> None:
    lines = run(config, "--trainer-options").output.splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert names == sorted(names) and "learning_rate: float" in lines and "output_dir" not in names


# -- which run -----------------------------------------------------------------------------------------------------


def test_the_run_whose_journal_was_written_last_is_meant(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        write_run(tmp_path / "runs" / name, name, written=1000.0 + number)
    (tmp_path / "runs" / "empty").mkdir()
    assert json.loads(run(status, "--json").output)["run_id"] == "new"


def test_the_variable_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "new", "new")
    write_run(tmp_path / "mine", "mine")
    monkeypatch.setenv("OUTPUT_DIR", "mine")
    assert json.loads(run(status, "--json").output)["run_id"] == "mine"
    assert json.loads(run(status, "runs/new", "--json").output)["run_id"] == "new"


@pytest.mark.parametrize("command", [status, report])
def test_where_there_is_no_run_one_must_be_named(command: Any) -> None:
    error = run(command).exception
    assert isinstance(error, UsageError) and "there is no run in ./runs" in str(error)


# -- status --------------------------------------------------------------------------------------------------------


def test_the_status_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert json.loads(run(status, "run", "--json").output)["runner_gone"] is False
    page = run(status, "run").output
    assert "run" in page and "4" in page and "out of date" not in page


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, waits = write_run(tmp_path / "run"), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            end(journal)

    monkeypatch.setattr("runner.cli.inspect.time.sleep", sleep)
    result = run(status, "run", "--watch")
    assert result.exit_code == 0 and "all is done" in result.output
    assert len(waits) == 2 and min(waits) >= 2.0
    # No terminal: a line when something has changed.
    first, second = result.output.splitlines()
    assert "starting · step 4 of 10" in first and "finished · step 4 of 10" in second
    # A run that is over is shown once.
    assert run(status, "run", "--watch").exit_code == 0 and len(waits) == 2


def test_a_status_that_is_slow_to_compute_is_refreshed_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, waits = write_run(tmp_path / "run"), list[float]()
    readings = iter(float(number) for number in range(100))
    monkeypatch.setattr("runner.cli.inspect.time.thread_time", lambda: next(readings))

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        end(journal)

    monkeypatch.setattr("runner.cli.inspect.time.sleep", sleep)
    run(status, "run", "--watch")
    assert waits == [10.0], "ten times the second that it took"


def test_ctrl_c_ends_the_watching_without_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runner.cli.inspect.time.sleep", interrupt)
    result = run(status, "run", "--watch")
    assert result.exit_code == 0 and result.exception is None


# -- report --------------------------------------------------------------------------------------------------------


def test_the_report_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    result = run(report, "run")
    assert result.output == f"runner: {tmp_path / 'run' / 'report.html'}\n"
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
    assert run(report, "run", "--output", "other.html").exit_code == 0 and (tmp_path / "other.html").exists()


@pytest.mark.parametrize("location", ["s3://bucket/run", "volume/checkpoints"])
def test_the_report_of_a_location_is_in_the_current_directory(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of checkpoints, or a bucket, is not the place for it."""
    write_run(tmp_path / "run")
    entries = entries_at(str(tmp_path / "run"))
    monkeypatch.setattr(module, "entries_at", lambda location: entries)
    assert run(report, location).output == f"runner: {tmp_path / 'report.html'}\n"


@pytest.mark.parametrize("options", [("--spot-discount", "1"), ("--price-per-hour", "-1")])
def test_prices_have_bounds(options: tuple[str, str]) -> None:
    assert run(report, *options).exit_code == 2


@pytest.mark.parametrize(
    ("options", "error"), [(("--serve", "--output", "x.html"), "omit --output"), (("--port", "80"), "needs --serve")]
)
def test_options_that_exclude_each_other(options: tuple[str, ...], error: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    refused = run(report, "run", *options).exception
    assert isinstance(refused, UsageError) and error in str(refused)


def test_what_is_no_run_is_not_served(tmp_path: Path) -> None:
    refused = run(report, str(tmp_path), "--serve").exception
    assert isinstance(refused, UsageError) and "holds no run" in str(refused)


def test_journals_that_cannot_be_read_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.journal import mirror

    class Partial:
        unread = "no route to host"

        def __init__(self, place: str) -> None:
            pass

        def entries(self) -> list[str]:
            return ["entry"]

    monkeypatch.setattr(mirror, "History", Partial)
    found: Any = entries_at("s3://bucket/run")
    assert found == ["entry"]
    assert capsys.readouterr().err == "runner: warning: some journals could not be read: no route to host\n"
