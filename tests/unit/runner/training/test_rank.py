"""What a rank reports of its job, and how it runs a script; in this process, which is left as it was."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from checkpointing.errors import EXIT_PREEMPTED
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from runner.program.program import Program
from runner.training import rank as module
from runner.training.rank import run_rank


class Launcher:
    """What the launcher gives a rank, and what the supervisor receives from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._receiver.bind(str(folder / "events"))
        self._receiver.setblocking(False)
        self.stop_reports: list[Any] = []
        self.exits = 0

    def run(self, text: str, *arguments: str, **environment: str) -> None:
        script = self._folder / "train.py"
        script.write_text(text)
        settings = {SETTINGS_ENV: RankSettings(attempt=3).to_json(), **environment}
        program = Program("script", str(script), arguments).to_json()
        spec = {"env": settings, "events": str(self._folder / "events"), "program": program, "resilient": "off"}
        run_rank({**spec, "config": "", "cache": "", "resumes": False, "accelerators": 0})

    def exit(self) -> None:
        self.exits += 1

    def events(self) -> list[dict[str, Any]]:
        found = []
        while True:
            try:
                found.append(json.loads(self._receiver.recv(1 << 16)))
            except BlockingIOError:
                return found

    def names(self) -> list[str]:
        return [str(event["event"]) for event in self.events()]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Everything that would change the process of the tests is left out."""
    made = Launcher(tmp_path)
    for name in ("die_with_parent", "be_traceable", "set_name"):
        monkeypatch.setattr(f"runner.training.rank.processes.{name}", lambda *_: None)
    monkeypatch.setattr(module, "_restore_signals", lambda: None)
    monkeypatch.setattr(module, "name_what_stays", lambda rank: None)
    monkeypatch.setattr("runner.training.rank.rank_signals.install", made.stop_reports.append)
    monkeypatch.setattr("runner.training.rank.faulthandler.enable", lambda: None)
    monkeypatch.setattr("runner.training.rank.multiprocessing.set_start_method", lambda *_, **__: None)
    monkeypatch.setattr("runner.training.rank.atexit._run_exitfuncs", made.exit)
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(module, "name_this_process", lambda *_: None)
    os.environ.update({"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": "/errors"})
    yield made
    made._receiver.close()


def test_begin_and_end_are_reported(launcher: Launcher) -> None:
    launcher.run("")
    started, done = launcher.events()
    assert started == {
        "event": "rank_started", "in_attempt": 3, "rank": 1, "local_rank": 0, "pid": os.getpid(),
        "error_file": "/errors",
    }  # fmt: skip
    assert (done["event"], done["rank"]) == ("rank_done", 1)
    assert launcher.exits == 1, "exit functions of the script have run"


def test_a_script_runs_as_under_torchrun(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 7")
    launcher.run(
        "import os, sys, beside_it\n"
        "assert __name__ == '__main__' and beside_it.VALUE == 7\n"
        "assert sys.argv[1:] == ['--lr', '3'] and sys.argv[0].endswith('train.py')\n"
        "assert os.environ['EXTRA'] == 'x'\n",
        "--lr",
        "3",
        EXTRA="x",
    )
    sys.modules.pop("beside_it")
    assert launcher.names() == ["rank_started", "rank_done"]


def test_processes_that_a_script_makes_are_not_told_of_the_launchers_store(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of torch.multiprocessing.spawn waited there for half an hour for one that nobody had started."""
    seen: list[str | None] = []

    def note(self: BaseProcess) -> None:
        seen.append(os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))

    monkeypatch.setattr(BaseProcess, "start", note)
    launcher.run(
        "import multiprocessing, os\n"
        "multiprocessing.Process().start()\n"
        "assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True'\n",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    assert seen == [None] and launcher.names() == ["rank_started", "rank_done"]


@pytest.mark.parametrize("code", ["", "0", "None"])
def test_a_script_that_exits_without_an_error_is_done(code: str, launcher: Launcher) -> None:
    launcher.run(f"import sys; sys.exit({code})")
    assert launcher.names() == ["rank_started", "rank_done"]


def test_an_orderly_stop_is_reported_as_one(launcher: Launcher) -> None:
    with pytest.raises(SystemExit):
        launcher.run(f"raise SystemExit({EXIT_PREEMPTED})")
    assert launcher.names() == ["rank_started", "rank_preempted"] and launcher.exits == 1


@pytest.mark.parametrize(("code", "names"), [("3", ["rank_started"]), ("'no data'", ["rank_started", "rank_failed"])])
def test_another_exit_code_is_raised_and_its_text_reported(code: str, names: list[str], launcher: Launcher) -> None:
    with pytest.raises(SystemExit):
        launcher.run(f"raise SystemExit({code})")
    events = launcher.events()
    assert [event["event"] for event in events] == names
    assert code == "3" or events[1]["error"] == "SystemExit: no data"


@pytest.mark.parametrize(("error", "transient"), [("ValueError", False), ("ConnectionError", True)])
def test_a_failure_is_reported_with_its_place_and_raised(
    error: str, transient: bool, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, ConnectionError)):
        launcher.run(f"\nraise {error}('x' * 10000)")
    _, failed = launcher.events()
    assert failed["event"] == "rank_failed" and failed["frame"].endswith("train.py:2")
    assert failed["transient"] is transient
    # A datagram is short; the log has the rest.
    assert failed["error"].startswith(f"{error}: xxx") and len(failed["error"]) == 4000
    assert "x" * 10000 in capsys.readouterr().err


def test_a_signal_to_one_rank_is_reported(launcher: Launcher) -> None:
    launcher.run("")
    launcher.events()
    [report] = launcher.stop_reports
    report()
    assert launcher.events() == [{"event": "stop_signal", "in_attempt": 3, "rank": 1}]


def test_a_lost_accelerator_ends_the_rank_before_its_job(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointing.process import device

    def refuse() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(device, "check_fork", refuse)
    launcher.run("")
    spec = {"env": {SETTINGS_ENV: RankSettings().to_json()}, "events": str(launcher._folder / "events")}
    launcher.events()
    with pytest.raises(RuntimeError, match="re-initialize"):
        run_rank({**spec, "program": Program("script", "train.py").to_json(), "resilient": "off", "accelerators": 1})
    assert launcher.names() == ["rank_started", "rank_failed"]
