from __future__ import annotations

from pathlib import Path
from typing import Any

from node_fakes import FakeSession

from runner.node.messages import Job
from runner.supervisor.own_node import own_node


def test_a_node_shares_what_its_session_has(tmp_path: Path) -> None:
    session = FakeSession(tmp_path)
    made: list[Any] = []

    def make_node(*arguments: Any, **options: Any) -> Any:
        made.append((arguments, options))

    own_node(session, Job("train.py"), "leaders-run", make_node=make_node)
    own_node(session, Job("train.py"), "leaders-run", record=made.append, make_node=make_node)
    (arguments, options), (_, others) = made
    assert arguments == (session.config, session.directory, Job("train.py"), "leaders-run")
    assert options["loop"] is session.loop and options["record"] == session.record and others["record"] == made.append
