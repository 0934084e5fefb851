"""With which options the helper processes of a node are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import Config
from runner.journal.run_directory import RunDirectory
from runner.node import helper_starter
from runner.node.helper_starter import HelperStarter
from runner.system import processes


class Started:
    """What a helper was started with."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AgentHelper", "LauncherHelper"):
        monkeypatch.setattr(helper_starter, name, Started)


def starter(folder: Path, node_rank: int) -> HelperStarter:
    launch = {"nnodes": 2, "node_rank": node_rank, "rdzv_endpoint": "leader:29500"}
    config = Config.model_validate({"output_dir": str(folder), "launch": launch})
    (folder / "runtime").mkdir(exist_ok=True)
    return HelperStarter(
        config, RunDirectory(str(folder), node_rank), "leaders-run", folder / "runtime", lambda: node_rank == 0
    )


@pytest.mark.parametrize(("node_rank", "commits"), [(0, True), (1, False)])
def test_the_first_nodes_agent_commits(tmp_path: Path, node_rank: int, commits: bool) -> None:
    started: Any = starter(tmp_path, node_rank).start_agent(lambda: False)
    assert started.arguments[0].commits is commits
    # `runner start` has used the location a moment ago.
    assert started.arguments[0].patience_s == 600.0
    assert started.options["directory"].parent == tmp_path / "runtime" and started.options["directory"].is_dir()


def test_each_helper_has_a_folder_of_its_own(tmp_path: Path) -> None:
    one = starter(tmp_path, 0)
    agents: list[Any] = [one.start_agent(lambda: False) for _ in range(2)]
    launcher: Any = one.start_launcher()
    folders = {*(agent.options["directory"] for agent in agents), launcher.arguments[2]}
    assert len(folders) == 3 and all(folder.parent == tmp_path / "runtime" for folder in folders)


def test_the_ranks_carry_the_mark_by_which_a_later_start_finds_them(tmp_path: Path) -> None:
    """It has the identity of the folder: that of the leader's run is not known before the leader answers."""
    started: Any = starter(tmp_path, 1).start_launcher()
    environment, log, _ = started.arguments
    assert environment[processes.PRELOAD_ENV].split()[3] == "runner.training.job"
    mark = processes.mark(RunDirectory(str(tmp_path)).run_id(), 1)
    assert environment[processes.RUN_ID_ENV] == mark and "leaders-run" not in mark
    assert log == RunDirectory(str(tmp_path), 1).logs / "launcher.log"
