from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeSession

from runner.errors import GpuFaulty
from runner.journal.attempts import Job
from runner.node import health_check
from runner.recovery.bad_machines import read_bad_machines
from runner.supervisor.make_node import make_node


def test_a_node_shares_what_its_session_has(tmp_path: Path) -> None:
    session = FakeSession(tmp_path)
    made: list[Any] = []

    def build(*arguments: Any, **options: Any) -> Any:
        made.append((arguments, options))

    make_node(session, Job("train.py"), "leaders-run", build=build)
    make_node(session, Job("train.py"), "leaders-run", record=made.append, build=build)
    (arguments, options), (_, others) = made
    assert arguments == (session.config, session.directory, Job("train.py"), "leaders-run")
    assert options["loop"] is session.loop and options["record"] == session.record and others["record"] == made.append


def test_the_gpus_of_a_node_of_several_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def build(*arguments: Any, **options: Any) -> Any:
        made.append(options)

    monkeypatch.setattr(
        health_check,
        "start_check",
        lambda output, errors: subprocess.Popen([sys.executable, "-c", "1/0"], stdout=output, stderr=errors),
    )
    several = {"nnodes": 2, "master_addr": "node0"}
    cases: list[dict[str, Any]] = [several, {}, {**several, "check_gpus": False}]
    sessions = [FakeSession(tmp_path / str(number), **launch) for number, launch in enumerate(cases)]
    for session in sessions:
        make_node(session, Job(), "run", build=build)
    assert ["check_gpus" in options for options in made] == [True, False, False]
    with pytest.raises(GpuFaulty, match="ZeroDivisionError"):
        made[0]["check_gpus"]()
    bad = read_bad_machines(sessions[0].config.tiers.durable.sidecars, sessions[0].clock())
    assert ["ZeroDivisionError" in one.cause for one in bad] == [True]
