"""How ranks reach their node's agent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small_checkpoint import network, write_checkpoint
from helpers.thread_ranks import run_ranks

from checkpointing.agent.options import AgentOptions
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import TrainingStages
from checkpointing.errors import AgentUnavailable, CheckpointError
from checkpointing.host.environment import RankSettings
from checkpointing.manager import node_services
from checkpointing.manager.node_services import AgentConnection
from checkpointing.manager.options import Options
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.cadence import Cadence


class Agents:
    """In place of processes: what was started, and who has connected."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.started: list[AgentOptions] = []
        self.connected: list[tuple[Any, ...]] = []
        self.closed = 0

    def start(self, options: AgentOptions) -> Any:
        if self.error:
            raise AgentUnavailable(self.error)
        self.started.append(options)
        return SimpleNamespace(socket_path=f"/socket-{options.commits}", close=self._close)

    def _close(self) -> None:
        self.closed += 1

    def connect(self, *arguments: Any, **options: Any) -> Any:
        self.connected.append(arguments)
        return SimpleNamespace(stage=options["stage"], close=lambda: None)


@pytest.fixture(autouse=True)
def fresh_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_services, "STAGES", TrainingStages())


def options(location: Path, settings: RankSettings | None = None) -> Options:
    return Options.resolve(
        settings or RankSettings(),
        location=location,
        local_tier=None,
        local_keep_last=2,
        resume=None,
        memory_limit=1 << 20,
        cadence=Cadence(),
        retention=Retention(),
        overlap=None,
        check_replicas=True,
        buddy_copies=True,
    )


def connection(agents: Agents, own: Options, ranks: Ranks | None = None) -> AgentConnection:
    return AgentConnection(own, ranks or Ranks(), start_agent=agents.start, connect=agents.connect)


def test_the_supervisors_agent_is_used(tmp_path: Path) -> None:
    agents = Agents()
    settings = RankSettings(agent_socket="/run/agent.sock", attempt=3, location=str(tmp_path))
    own = connection(agents, options(tmp_path, settings))
    assert agents.started == [] and agents.connected == [("/run/agent.sock", 3, 0, 0, 1)]
    own.close_own_agent()
    assert agents.closed == 0


def test_without_a_supervisor_each_nodes_first_rank_starts_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, network())
    agents = Agents()
    own = options(tmp_path)
    found = run_ranks(lambda ranks: connection(agents, own, ranks), 4, per_node=2)
    assert all(isinstance(one, AgentConnection) for one in found)
    # It belongs to the run whose checkpoints are there; only one agent commits.
    assert [start.run_id for start in agents.started] == ["run", "run"]
    assert sorted(start.commits for start in agents.started) == [False, True]
    sockets = {rank: socket for socket, _, rank, _, _ in agents.connected}
    assert sockets == {0: "/socket-True", 1: "/socket-True", 2: "/socket-False", 3: "/socket-False"}
    assert {attempt for _, attempt, *_ in agents.connected} == {2}
    for one in found:
        assert isinstance(one, AgentConnection)
        one.close_own_agent()
    assert agents.closed == 2


def test_every_rank_learns_that_no_agent_started(tmp_path: Path) -> None:
    agents = Agents("no memory")
    for error in run_ranks(lambda ranks: connection(agents, options(tmp_path), ranks)):
        assert isinstance(error, CheckpointError) and str(error) == "no memory"


def test_a_finished_training_is_followed_by_another_stage(tmp_path: Path) -> None:
    agents = Agents()
    for finished, name in ((False, ""), (True, ""), (True, "stage-2")):
        own = connection(agents, options(tmp_path))
        assert own.stage.name == name
        own.leave(20, finished=finished)


def test_where_checkpoints_are_kept_is_said_once_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt in (1, 2):
        settings = RankSettings(agent_socket="/socket", attempt=attempt, location=str(tmp_path / "kept"))
        connection(Agents(), options(tmp_path / "own", settings))
    assert capsys.readouterr().err.count("checkpoints are kept at") == 1
