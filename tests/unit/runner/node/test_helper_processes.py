"""The agent and the launcher as processes: their options, how a start fails, and what crosses the sockets."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.node_fakes import beat

from checkpointing.agent import protocol
from checkpointing.agent.options import AgentOptions
from checkpointing.errors import AgentDelayed, AgentUnavailable
from checkpointing.host.heartbeat import ControlPage, Phase
from runner.config.schema import Config
from runner.errors import LaunchDelayed, LaunchError
from runner.journal.run_directory import RunDirectory
from runner.node import helper_processes
from runner.node.helper_processes import AgentHelper, HelperStarter, LauncherHelper
from runner.system import processes

MODULE = helper_processes.__name__


class FakeAgent:
    """The other side: a process, its socket and its page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.page = ControlPage.create(2)
        self.child = subprocess.Popen(["sleep", "100"])
        self.error: BaseException | None = None
        self.waited: list[float | None] = []
        self.process = SimpleNamespace(process=self.child, socket_path="agent.sock", close=self.waited.append)
        self.process.close = lambda timeout_s: self.waited.append(timeout_s)
        monkeypatch.setattr(f"{MODULE}.AgentProcess.start", self._start)
        monkeypatch.setattr(f"{MODULE}.protocol.connect", lambda path, timeout_s: self.theirs)

    def _start(self, *_: Any, **__: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.process

    def connect(self) -> AgentHelper:
        protocol.send(self.ours, {"event": "welcome"}, (self.page.fd,))
        return make_agent()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.page.close()
        self.child.kill()
        self.child.wait()


def make_agent() -> AgentHelper:
    options = AgentOptions(location="location", run_id="run")
    return AgentHelper(options, directory=Path("folder"), cancelled=lambda: False)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    fake = FakeAgent(monkeypatch)
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AgentUnavailable("the volume is read-only"), LaunchError),
        (AgentDelayed("by signal 9"), LaunchDelayed),
        (OSError("too many open files"), LaunchError),
        # It listened already, so its connection ends only with it.
        (ConnectionResetError("reset"), LaunchDelayed),
    ],
)
def test_an_agent_that_does_not_start(agent: FakeAgent, error: Exception, expected: type[Exception]) -> None:
    agent.error = error
    with pytest.raises(expected, match=str(error)):
        make_agent()


def test_an_agent_that_dies_before_it_answers_was_killed(agent: FakeAgent) -> None:
    agent.ours.close()
    with pytest.raises(LaunchDelayed):
        make_agent()
    assert agent.waited == [0.0], "it would keep the location's lock"


def test_what_an_agent_has_reported_is_read_after_its_end(agent: FakeAgent) -> None:
    helper = agent.connect()
    for step in (1, 2):
        protocol.send(agent.ours, {"event": "committed", "step": step})
    agent.ours.close()
    assert [message["step"] for message in helper.last_messages()] == [1, 2]
    helper.close()


def test_requests_and_heartbeats(agent: FakeAgent) -> None:
    helper = agent.connect()
    helper.request("note", text="state")
    assert [protocol.receive(agent.ours)[0] for _ in range(2)] == [
        {"do": "hello", "role": "monitor"},
        {"do": "note", "text": "state"},
    ]
    expected = beat(Phase.TRAINING, 7)
    agent.page.write(1, expected)
    assert helper.heartbeats(2)[1] == expected
    assert len(helper.heartbeats(1)) == 1
    assert len(helper.heartbeats(10_000)) == helper.control.num_slots
    helper.close()


def test_the_process_of_an_agent(agent: FakeAgent) -> None:
    helper = agent.connect()
    assert (helper.alive, helper.pid, helper.returncode) == (True, agent.child.pid, None)
    helper.end()
    assert (helper.alive, helper.returncode) == (False, -signal.SIGKILL)
    agent.ours.close()
    helper.request("ping")
    helper.close()
    assert agent.waited == [None]


def test_an_agent_that_is_closed_while_it_runs_gets_a_second(agent: FakeAgent) -> None:
    agent.connect().close()
    assert agent.waited == [1.0]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """Commands of the launcher; another process runs in its place."""
    commands: list[tuple[list[str], dict[str, Any]]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        commands.append((command, options))
        return popen(["sleep", "100"], **options)

    monkeypatch.setattr(f"{MODULE}.subprocess.Popen", start)
    return commands


def make_launcher(**environment: str) -> LauncherHelper:
    return LauncherHelper({"PATH": os.environ["PATH"], **environment}, Path("launcher.log"), Path("temporary"))


def test_how_a_launcher_is_started(started: list[tuple[list[str], dict[str, Any]]]) -> None:
    launcher = make_launcher(PYTHONWARNINGS="error", RUN="7")
    try:
        ((command, options),) = started
        assert command[:3] == [sys.executable, "-m", "runner.launcher.launcher"]
        assert command[4:] == ["launcher.log", "temporary", str(os.getpid())]
        assert options["pass_fds"] == (int(command[3]),)
        assert options["start_new_session"], "the terminal's Ctrl-C must not reach the ranks"
        assert options["env"]["RUN"] == "7"
        assert options["env"]["PYTHONWARNINGS"] == "error,ignore:resource_tracker:UserWarning"
    finally:
        launcher.close()


@pytest.mark.usefixtures("started")
def test_the_process_of_a_launcher() -> None:
    launcher = make_launcher()
    assert launcher.alive and launcher.pid == launcher.popen.pid
    launcher.end()
    assert (launcher.alive, launcher.returncode) == (False, -signal.SIGKILL)
    launcher.send({"attempt": 1})
    launcher.close()


@pytest.mark.parametrize(("number", "expected"), [(errno.EAGAIN, LaunchDelayed), (errno.ENOENT, LaunchError)])
def test_a_launcher_that_the_system_refuses_may_start_later(
    number: int, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"{MODULE}.subprocess.Popen", refused)
    with pytest.raises(LaunchError, match="the launcher did not start") as caught:
        LauncherHelper({}, tmp_path / "log", tmp_path)
    assert type(caught.value) is expected


class StartedWith:
    """What a helper was started with."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AgentHelper", "LauncherHelper"):
        monkeypatch.setattr(helper_processes, name, StartedWith)


def starter(folder: Path, node_rank: int) -> HelperStarter:
    launch = {"nnodes": 2, "node_rank": node_rank, "rdzv_endpoint": "leader:29500"}
    config = Config.model_validate({"output_dir": str(folder), "launch": launch})
    (folder / "runtime").mkdir(exist_ok=True)
    return HelperStarter(
        config, RunDirectory(str(folder), node_rank), "leaders-run", folder / "runtime", lambda: node_rank == 0
    )


@pytest.mark.usefixtures("_no_processes")
@pytest.mark.parametrize(("node_rank", "commits"), [(0, True), (1, False)])
def test_the_first_nodes_agent_commits(tmp_path: Path, node_rank: int, commits: bool) -> None:
    started: Any = starter(tmp_path, node_rank).start_agent(lambda: False)
    assert started.arguments[0].commits is commits
    # `runner start` has used the location a moment ago.
    assert started.arguments[0].patience_s == 600.0
    assert started.options["directory"].parent == tmp_path / "runtime" and started.options["directory"].is_dir()


@pytest.mark.usefixtures("_no_processes")
def test_each_helper_has_a_folder_of_its_own(tmp_path: Path) -> None:
    one = starter(tmp_path, 0)
    agents: list[Any] = [one.start_agent(lambda: False) for _ in range(2)]
    launcher: Any = one.start_launcher()
    folders = {*(agent.options["directory"] for agent in agents), launcher.arguments[2]}
    assert len(folders) == 3 and all(folder.parent == tmp_path / "runtime" for folder in folders)


@pytest.mark.usefixtures("_no_processes")
def test_the_ranks_carry_the_mark_by_which_a_later_start_finds_them(tmp_path: Path) -> None:
    """It has the identity of the folder: that of the leader's run is not known before the leader answers."""
    started: Any = starter(tmp_path, 1).start_launcher()
    environment, log, _ = started.arguments
    assert environment[processes.PRELOAD_ENV].split()[3] == "runner.training.job"
    mark = processes.mark(RunDirectory(str(tmp_path)).run_id(), 1)
    assert environment[processes.RUN_ID_ENV] == mark and "leaders-run" not in mark
    assert log == RunDirectory(str(tmp_path), 1).logs / "launcher.log"
