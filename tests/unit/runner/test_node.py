from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing import protocol
from runner.node import Node


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
