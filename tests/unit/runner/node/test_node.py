from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.agent import protocol
from runner.config.schema import LaunchConfig
from runner.node.messages import Job, Order
from runner.node.node import Node


@pytest.mark.parametrize(
    ("event", "is_progress"),
    [("committed", True), ("transfer", True), ("pong", False), ("storage_retried", False), ("note_failed", False)],
)
def test_an_agent_that_only_complains_gets_nowhere(event: str, is_progress: bool) -> None:
    """It is not waited for because storage that hangs makes it say so every minute."""
    node: Any = object.__new__(Node)
    node._heard_at, node.committed_step, node._failed_saves = 0.0, -1, {}
    state = SimpleNamespace(show_transfer=lambda message: None)
    node._display = SimpleNamespace(message=lambda text: None, state=state)
    node._record = lambda event, **details: None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        details = {"step": 1, "tier": "remote", "count": 1, "reason": "it was slow"}
        protocol.send(theirs, {"event": event, **details})
        node._on_agent(ours)
    assert (node._heard_at > 0) == is_progress


def launched(job: Job, order: Order, committed_step: int = -1) -> dict[str, Any]:
    """What ranks are started with."""
    node: Any = object.__new__(Node)
    node._agent = SimpleNamespace(process=SimpleNamespace(socket_path="socket"))
    checkpoint = SimpleNamespace(local_tier=None)
    node._config = SimpleNamespace(launch=LaunchConfig(), checkpoint=checkpoint, checkpoint_location="place")
    node._directory = SimpleNamespace(logs=Path("logs"), config=Path("config"), cache=Path("cache"))
    node._events, node._job, node._nproc, node._cold = SimpleNamespace(path="events"), job, 2, False
    node.run_id, node.committed_step, node._accelerators = "run", committed_step, 0
    request: dict[str, Any] = node._launch_request(order, 1)["spec"]
    return request


def test_ranks_learn_where_to_start_from_and_whether_the_job_may_differ() -> None:
    names = {"CHECKPOINT_RESUME_FROM", "CHECKPOINT_ALLOW_CHANGES"}
    assert not names & launched(Job(), Order(1, 1))["env"].keys()
    told = launched(Job(resume_from="/own", allow_changes=True), Order(1, 1, resume_from="/first"))["env"]
    assert [told[name] for name in sorted(names)] == ["1", "/own"]
    # Another node's ranks learn it from the first one.
    message = Order(1, 1, resume_from="/first", allow_changes=True).to_message()
    told = launched(Job(), Order.from_message(message))["env"]
    assert [told[name] for name in sorted(names)] == ["1", "/first"]


@pytest.mark.parametrize(
    ("attempt", "committed_step", "resume_from", "resumes"),
    [(1, -1, "", False), (2, -1, "", True), (1, 20, "", True), (2, 20, "/stock", False)],
)
def test_base_weights_are_left_out_where_all_are_restored(
    attempt: int, committed_step: int, resume_from: str, resumes: bool
) -> None:
    """A stock Trainer's checkpoint may lack some, which then were those of the base model."""
    order = Order(attempt, 1, resume_from=resume_from)
    assert launched(Job(), order, committed_step)["resumes"] is resumes
