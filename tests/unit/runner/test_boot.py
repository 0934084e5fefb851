"""`runner start` up to the supervisor, and what it prints of its end; the supervisor does what the test has planned."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from helpers.journals import entry, event
from helpers.node_fakes import FakeDisplay

from checkpointing.storage import LocalStorage
from runner import boot
from runner.boot import move_aside, paths_of
from runner.cli import start as command
from runner.cli.start import start
from runner.config.schema import Config
from runner.errors import ExitCode, StorageFailed, UsageError
from runner.journal import run_directory
from runner.journal.journal import Journal
from runner.journal.run_directory import RunDirectory
from runner.lease.leadership import Inherited
from runner.lease.lease import LeaseRecord
from runner.program.program import Program
from runner.session import preflight
from runner.system.event_loop import StopRequest
from runner.ui import prometheus


class Runs:
    """In place of supervisor and follower.

    Attributes:
        code: What a run ends with.
        step: Step that a run reaches.
        started: What was to be run: the role, and what it was given.
        display: What was shown.
    """

    def __init__(self) -> None:
        self.code, self.step, self.failed_log = ExitCode.DONE, 0, None
        self.was_replaced = False
        self.inherited: Inherited | None = None
        self.reason = "a rank failed"
        self.started: list[tuple[str, Any]] = []
        self.served: list[tuple[str, int]] = []
        self.display = FakeDisplay()

    def make(self, role: str) -> Callable[..., Any]:
        def made(own_session: Any, job: Any, **options: Any) -> Any:
            self.started.append((role, SimpleNamespace(session=own_session, job=job, **options)))
            return self

        return made

    def run(self) -> ExitCode:
        role, given = self.started[-1]
        if role == "follower" and self.inherited is not None:
            exit_code: ExitCode = given.takeover._lead(
                LeaseRecord(3, "b", "b1", 1, "10.0.0.2", "the-run"), self.inherited
            )
            return exit_code
        if self.step:
            journal = Journal(self.started[-1][1].session.directory.journal, time.time)
            journal.append(event("run_started", run_id="r", committed_step=-1), 0)
            journal.append(event("log", step=self.step, loss=1.0), 1)
            journal.close()
        return self.code


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Nothing of this process is changed, and nothing is started."""
    made = Runs()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_DIR", raising=False)
    monkeypatch.setattr(command, "make_streams_lossy", lambda: None)
    monkeypatch.setattr(StopRequest, "count_signals", lambda self: None)
    monkeypatch.setattr(boot, "Supervisor", made.make("supervisor"))
    monkeypatch.setattr(boot, "Follower", made.make("follower"))
    # Locks last as long as the process, which is that of the tests.
    for one in (run_directory, preflight):
        monkeypatch.setattr(one, "hold_lock", lambda *_, **__: (os.open(os.devnull, os.O_RDONLY), True))
    monkeypatch.setattr(
        boot,
        "Session",
        lambda config, directory, display, stop: SimpleNamespace(config=config, directory=directory, stop=stop),
    )
    monkeypatch.setattr(boot, "ProgressDisplay", lambda **options: made.display)
    monkeypatch.setattr(prometheus, "serve", lambda address, port, collector: made.served.append((address, port)))
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(start, ["--output-dir", "run", *arguments])


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError), (result, result.output)
    return str(result.exception)


def test_a_script_runs_under_the_supervisor(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = run("--grace", "5", "--max-restarts", "3", "train.py", "--lr", "3")
    assert result.exit_code == 0 and "runner: finished" in result.output, result.output
    [(role, given)] = runs.started
    assert role == "supervisor" and given.location_id is not None
    assert given.job.program == Program("script", str(tmp_path / "train.py"), ("--lr", "3")) and given.job.show_output
    config = given.session.config
    assert (config.restart.grace_s, config.restart.max_restarts) == (5.0, 3)
    # A later session finds the same paths.
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["output_dir"] == str(tmp_path / "run")
    assert runs.display.texts[0].endswith(f"in {tmp_path / 'run'}, resume auto")


@pytest.mark.parametrize(
    ("code", "log", "text"),
    [
        (ExitCode.PREEMPTED, "err.log", "runner: stopped: a rank failed (exit code 75)\n"),
        (ExitCode.DETERMINISTIC, "err.log", "runner: failed: a rank failed (exit code 78; log: err.log)\n"),
        (ExitCode.BUDGET_SPENT, None, "runner: failed: a rank failed (exit code 76)\n"),
    ],
)
def test_the_end_is_explained_and_is_the_exit_code(code: ExitCode, log: Any, text: str, runs: Runs) -> None:
    runs.code, runs.failed_log = code, log
    result = run()
    assert result.exit_code == int(code) and result.output.endswith(text)


def test_a_run_that_trained_is_summarised_with_its_paths(runs: Runs, tmp_path: Path) -> None:
    runs.step = 7
    result = run()
    assert result.exit_code == 0 and not result.output.startswith("runner: finished")
    assert str(tmp_path / "run" / "journal.jsonl") in result.output
    assert str(tmp_path / "run" / "best_model") not in result.output, "there is none"


def test_a_finished_run_is_not_started_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "is_done", lambda *_: True)
    result = run()
    assert result.exit_code == 0 and "this run is finished; nothing to do" in result.output
    assert runs.started == []


def test_another_node_follows(runs: Runs) -> None:
    runs.code = ExitCode.PREEMPTED
    result = run("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "host:29500", "--allow-changes")
    [(role, given)] = runs.started
    assert role == "follower" and given.compared is False and result.exit_code == 75
    assert given.session.directory.job.exists()


def test_a_leader_that_was_replaced_follows_in_the_same_process(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = list[list[str]]()
    environment = dict(os.environ)
    monkeypatch.setattr("runner.cli.start.os.environ", environment)
    monkeypatch.setattr("runner.boot.os.execv", lambda program, arguments: executed.append(arguments))
    monkeypatch.setattr(sys, "orig_argv", ["python", "runner", "start"])
    runs.was_replaced, runs.code = True, ExitCode.PREEMPTED
    assert "a rank failed; this node follows it" in run("--resume", "never").output
    assert executed == [[sys.executable, "runner", "start"]]
    # What it has led is not started over.
    runs.was_replaced = False
    run("--resume", "never", "--overwrite")
    assert runs.display.texts[-1].endswith("resume auto") and "_RUNNER_FOLLOWS" not in environment


def test_a_node_whose_storage_fails_when_it_begins_to_lead_follows_again(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with 2, as if the location had been a mistake: found by `runner chaos --nodes 3 --seed 23003`."""
    executed, closed = list[list[str]](), list[bool]()
    monkeypatch.setattr("runner.cli.start.os.environ", dict(os.environ))
    monkeypatch.setattr("runner.boot.os.execv", lambda program, arguments: executed.append(arguments))
    monkeypatch.setattr(boot, "take_over", lambda *_: None)
    node: Any = SimpleNamespace(close=lambda: closed.append(True))
    runs.inherited = Inherited(node)

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/volume/.supervisor.lock")

    monkeypatch.setattr(preflight.LocationLock, "hold", refused)
    result = run("--nnodes", "1:2", "--node-rank", "1", "--rdzv-endpoint", "host:29500")
    assert "this node cannot lead" in result.output and "Read-only file system; it follows" in result.output
    assert result.exit_code == 75 and len(executed) == 1 and closed == [True]
    assert [role for role, _ in runs.started] == ["follower"]


def test_storage_that_a_run_was_using_is_waited_for(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that came back while its disk was read-only ended with 2: `runner chaos --nodes 3 --seed 25008`."""
    answers: list[Exception | None] = []

    def probe(_: object) -> None:
        if answers and (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(LocalStorage, "probe", probe)
    monkeypatch.setattr(preflight, "_RETRY_S", 0.0)
    read_only = OSError(errno.EROFS, "Read-only file system")
    answers[:] = [read_only, None]
    assert isinstance(run().exception, StorageFailed) and not runs.started, "at the first start, it is reported at once"
    assert run().exit_code == 0 and len(runs.started) == 1
    answers[:] = [read_only, None]
    result = run()
    assert "Read-only file system; start again when that works; trying again for 600 s" in result.output
    assert len(runs.started) == 2
    answers[:] = [read_only]
    assert isinstance(run("--set", "checkpoint.location=elsewhere").exception, StorageFailed), "never used before"
    # A node that led a run, and follows now.
    answers[:] = [OSError(errno.ENOSPC, "No space left on device"), None]
    monkeypatch.setenv("_RUNNER_FOLLOWS", "1")
    assert "No space left on device; make room, then start again; trying again" in run().output
    assert [role for role, _ in runs.started] == ["supervisor"] * 3


def test_a_leader_that_is_to_stop_does_not_follow(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.boot.os.execv", lambda *_: pytest.fail("it was to stop"))
    runs.was_replaced, runs.code = True, ExitCode.PREEMPTED
    monkeypatch.setattr(StopRequest, "count_signals", lambda self: self.ask("SIGTERM"))
    # Its checks end at once; here they are done before.
    monkeypatch.setattr(boot, "unless_stopped", lambda stop, work: work())
    assert run().exit_code == 75


@pytest.mark.parametrize(
    ("options", "address"),
    [([], "127.0.0.1"), (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "host:1"], "127.0.0.1"),
     (["--set", "monitoring.address=10.0.0.1"], "10.0.0.1")],
)  # fmt: skip
def test_metrics_are_for_this_machine(options: list[str], address: str, runs: Runs) -> None:
    assert run("--metrics-port", "9400", *options).exit_code == 0
    assert runs.served == [(address, 9400)]


def observed(runs: Runs, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[list[str], list[str]]:
    """What is sent of a run with a webhook, and what the end of its session has."""
    sent: list[str] = []
    observers: list[Callable[[Any], None]] = []

    class Hook:
        def __init__(self, *_: Any) -> None:
            pass

        def put(self, notification: Any) -> None:
            sent.append(notification.kind)

        def close(self, patience_s: float) -> None:
            sent.append("closed")

    def session(config: Any, directory: Any, display: Any, stop: Any) -> Any:
        return SimpleNamespace(config=config, directory=directory, stop=stop, run_id="r", observers=observers)

    def end(*_: Any) -> ExitCode:
        for observe in observers:
            observe(entry(1.0, "run_ended", state="failed", exit_code=76))
        return runs.code

    monkeypatch.setattr(boot, "Webhook", Hook)
    monkeypatch.setattr(boot, "Session", session)
    monkeypatch.setattr(runs, "run", end)
    monkeypatch.setattr(boot, "_start_again_as_follower", lambda: None)
    run("--set", "notify.url=https://host/", *options)
    return sent, [role for role, _ in runs.started]


def test_a_leader_notifies_and_waits_for_the_last_message(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert observed(runs, monkeypatch) == (["failed", "closed"], ["supervisor"])


def test_a_follower_does_not_notify(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "localhost:1")
    assert observed(runs, monkeypatch, *nodes) == ([], ["follower"])


def test_a_leader_that_was_replaced_does_not_tell_of_an_end(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.was_replaced = True
    assert observed(runs, monkeypatch)[0] == ["closed"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["missing.py"], "script 'missing.py' does not exist"),
        (["--overwrite"], "--overwrite needs --resume never"),
        (["--resume", "sometimes"], "use auto, never, or the number"),
        (["--debug", "--resume", "5"], "--debug always starts from scratch"),
        (["--resume-from", "nowhere"], "'nowhere'"),
        (["--nnodes", "2:3", "--rdzv-endpoint", "host:1"], "give each its own --node-rank"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    arguments: list[str], problem: str, runs: Runs, tmp_path: Path
) -> None:
    assert problem in refused(*arguments)
    assert runs.started == [] and not (tmp_path / "run").exists()


def test_a_script_cannot_be_scaled_down(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert "--debug cannot scale down a script" in refused("--debug", "train.py")


def test_debugging_replaces_its_own_earlier_run_only(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.cli.start.os.environ", dict(os.environ))
    for _ in range(2):
        assert run("--debug").exit_code == 0
        (tmp_path / "run-debug" / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    assert (tmp_path / "run-debug" / "previous-1").is_dir() and not (tmp_path / "run").exists()
    assert runs.started[0][1].session.config.trainer["max_steps"] == 20


# -- an earlier run ------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_refused_or_moved_aside(runs: Runs, tmp_path: Path) -> None:
    kept = tmp_path / "run" / "checkpoints" / "checkpoint-5"
    kept.mkdir(parents=True)
    assert "already contains a run; add --overwrite" in refused("--resume", "never")
    result = run("--resume", "never", "--overwrite")
    aside = tmp_path / "run" / "previous-1"
    assert result.exit_code == 0 and f"moved the earlier run to {aside}" in result.output
    assert (aside / "checkpoints" / "checkpoint-5").is_dir() and not kept.exists()


def test_a_new_run_overwrites_nothing(runs: Runs, tmp_path: Path) -> None:
    assert run("--resume", "never").exit_code == 0
    assert not (tmp_path / "run" / "previous-1").exists()


# -- the rest ------------------------------------------------------------------------------------------------------


def test_checks_are_waited_for_and_their_errors_raised() -> None:
    assert boot.unless_stopped(StopRequest(), lambda: 7) == 7
    for error in (UsageError("no"), TimeoutError("the server")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            boot.unless_stopped(StopRequest(), fail)


def test_a_stop_request_does_not_wait_for_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("runner.boot.os._exit", leave)
    stop = StopRequest()
    stop.ask("SIGTERM")
    with pytest.raises(SystemExit) as end:
        boot.unless_stopped(stop, lambda: time.sleep(0.01))
    assert end.value.code == ExitCode.PREEMPTED
    assert "stopped before the first attempt" in capsys.readouterr().out


class Remote:
    """An object store with checkpoints of these steps."""

    location, root = "s3://bucket/run", None

    def __init__(self, *steps: int) -> None:
        self._steps, self.sidecars = list(steps), self
        self.state: bytes | None = b'{"failures": 3}'

    def steps(self) -> list[int]:
        return self._steps

    def read_restart_state(self) -> bytes | None:
        return self.state

    def write_restart_state(self, data: bytes) -> None:
        self.state = data


def start_over(store: Remote, directory: RunDirectory, *, overwrite: bool) -> bool:
    config: Any = SimpleNamespace(tiers=SimpleNamespace(nearest_first=[store], durable=store))
    return move_aside(config, directory, overwrite=overwrite)


def test_an_object_store_cannot_move_checkpoints(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    directory.create()
    with pytest.raises(UsageError, match="an object store cannot move them"):
        start_over(Remote(5), directory, overwrite=True)


def test_failures_of_another_run_do_not_count(tmp_path: Path) -> None:
    directory, store = RunDirectory(str(tmp_path / "run")), Remote()
    directory.create()
    assert not start_over(store, directory, overwrite=False)
    assert store.state == b"{}"


def test_paths_that_exist_and_urls_are_shown(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"output_dir": str(tmp_path), "checkpoint": {"location": "s3://bucket/run", "local_tier": str(tmp_path / "no")}}
    )
    directory = RunDirectory(str(tmp_path))
    directory.create()
    assert paths_of(config, directory) == {"checkpoints": "s3://bucket/run", "logs": str(tmp_path / "logs")}
