"""Whom the leader refuses, and what it says of a port that it cannot have; see test_membership.py for the rest."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from node_fakes import FakeSession

from runner.errors import UsageError
from runner.supervisor.identity import JobIdentity
from runner.supervisor.peer_messages import Hello
from runner.supervisor.peer_port import listen, refusal

OURS = JobIdentity({"job": "the configured job", "trainer.learning_rate": 1e-4})
OTHER = JobIdentity({"job": "the configured job", "trainer.learning_rate": 2e-4})


def test_any_job_is_accepted_where_either_side_does_not_compare() -> None:
    def reason(ours: JobIdentity | None, theirs: JobIdentity | None) -> str | None:
        return refusal(ours, Hello(node_rank=1, job=theirs.to_json().decode() if theirs is not None else ""))

    assert reason(OURS, OURS) is reason(None, OTHER) is reason(OURS, None) is None
    assert "(trainer.learning_rate: 0.0001 -> 0.0002)" in str(reason(OURS, OTHER))


@pytest.mark.parametrize(
    ("bind", "number", "text"),
    [
        (None, errno.EADDRINUSE, r"launch\.peer_port: port 29401 cannot be used"),
        ("10.0.0.1", errno.EADDRINUSE, r"launch\.peer_port: port 29401 cannot be used"),
        ("10.0.0.1", errno.EADDRNOTAVAIL, r"launch\.peer_bind: '10\.0\.0\.1' is not an address of this node"),
    ],
)
def test_the_option_at_fault_is_named(bind: str | None, number: int, text: str, tmp_path: Path) -> None:
    session = FakeSession(tmp_path, nnodes=2, master_addr="127.0.0.1", master_port=29400, peer_bind=bind)

    def refused(*_: object, **__: object) -> Any:
        raise OSError(number, "why")

    with pytest.raises(UsageError, match=text):
        listen(session, 2, lambda *_: None, OURS, refused)
