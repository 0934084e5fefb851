"""What a run is asked for, when its runner answers, refuses, or is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers.journals import event

from runner.cli import ask
from runner.cli.ask import save, stop
from runner.errors import UsageError
from runner.journal.journal import Journal


class Runner:
    """A runner that a test plays: it takes a file and records what follows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.requests = folder, folder / "requests"
        self.requests.mkdir()
        self.journal = Journal(folder / "journal.jsonl", time.time)
        self.record("run_started", run_id="run", committed_step=-1, location="/data/checkpoints")

    def record(self, name: str, **details: object) -> None:
        self.journal.append(event(name, **details), 1)

    def ask(self, command: click.Command, *options: str, then: Callable[[], None]) -> tuple[int, str]:
        """Run a command; what the runner does `then` begins when it has taken the request."""

        def answer() -> None:
            file = self.requests / (command.name or "")
            while not file.exists():
                time.sleep(0.005)
            file.unlink()
            then()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        result = CliRunner().invoke(command, [str(self.folder), *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_a_checkpoint_of_a_later_step_is_waited_for(runner: Runner) -> None:
    def then() -> None:
        runner.record("save_requested", source="runner save", step=40)
        # The commit of a step before was under way.
        runner.record("committed", step=40)
        runner.record("committed", step=41)

    assert runner.ask(save, "--wait", then=then) == (
        0,
        "runner: /data/checkpoints/checkpoint-41 is committed (local)\n",
    )


def test_without_waiting_the_step_is_named(runner: Runner) -> None:
    code, output = runner.ask(save, then=lambda: runner.record("save_requested", source="runner save", step=40))
    assert code == 0 and "step 40 has ended" in output


def test_a_request_that_waits_for_the_next_attempt_is_no_checkpoint_yet(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "_PATIENCE_S", 0.2)
    # The commit is of the attempt before.
    code, output = runner.ask(save, then=lambda: runner.record("committed", step=40))
    assert code == 0 and "no rank takes steps now" in output

    def later() -> None:
        runner.record("committed", step=40)
        time.sleep(0.5)
        runner.record("save_requested", source="runner save", step=40)
        runner.record("committed", step=42)

    code, output = runner.ask(save, "--wait", then=later)
    assert code == 0 and "checkpoint-42 is committed" in output


def test_a_program_of_which_nothing_is_saved_has_no_checkpoint(runner: Runner) -> None:
    def then() -> None:
        runner.record("save_requested", source="runner save", step=0, saves=False)

    for options in ([], ["--wait"]):
        code, output = runner.ask(save, *options, then=then)
        assert code == 1 and "nothing of this program is saved so far" in output


def test_a_run_that_ends_instead_is_said(runner: Runner) -> None:
    def then() -> None:
        runner.record("save_requested", source="runner save", step=40)
        runner.record("run_ended", state="failed", exit_code=78, reason="a bug")

    code, output = runner.ask(save, "--wait", then=then)
    assert code == 1 and "ended before the checkpoint was committed" in output


def test_the_end_is_waited_for(runner: Runner) -> None:
    def then() -> None:
        runner.record("run_ended", state="preempted", exit_code=75, reason="stopped on request")

    assert runner.ask(stop, "--wait", then=then) == (0, "runner: preempted: stopped on request\n")


def refused(command: click.Command, *arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        raise CliRunner().invoke(command, arguments).exception  # type: ignore[misc]
    return str(caught.value)


def test_a_run_that_has_ended_is_asked_for_nothing(runner: Runner) -> None:
    runner.record("run_ended", state="finished", exit_code=0)
    assert "is not running (finished)" in refused(save, str(runner.folder))
    assert not list(runner.requests.iterdir())


def test_a_runner_that_was_killed_is_asked_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Runner(tmp_path)
    monkeypatch.setattr("runner.ui.status.runner_is_gone", lambda entries: True)
    assert "is not running (its runner is gone)" in refused(stop, str(tmp_path))


def test_a_request_that_nobody_takes_is_withdrawn(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_PATIENCE_S", 0.2)
    assert "no runner has taken the request" in refused(stop, str(runner.folder))
    assert not list(runner.requests.iterdir())


@pytest.mark.parametrize(
    ("location", "part"), [("s3://bucket/run", "is not a folder"), ("/nonexistent", "holds no run")]
)
def test_what_is_no_run_is_refused(location: str, part: str) -> None:
    assert part in refused(save, location)


def test_a_folder_that_cannot_be_written_is_said(runner: Runner) -> None:
    runner.requests.rmdir()
    assert "run this as the user of the run" in refused(stop, str(runner.folder))
