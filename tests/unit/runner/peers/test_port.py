"""Whom the leader refuses, and what it says of a port that it cannot have; see test_membership.py for the rest."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeSession

from runner.errors import UsageError
from runner.peers.messages import Finish, Hello
from runner.peers.port import listen, refusal
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.bad_machines import Exclusion
from runner.session.identity import JobIdentity

OURS = JobIdentity({"job": "the configured job", "trainer.learning_rate": 1e-4})
OTHER = JobIdentity({"job": "the configured job", "trainer.learning_rate": 2e-4})


def test_any_job_is_accepted_where_either_side_does_not_compare(tmp_path: Path) -> None:
    session = FakeSession(tmp_path)
    exclusion = Exclusion(session.config, session.clock)

    def end(ours: JobIdentity | None, theirs: JobIdentity | None) -> Finish | None:
        job = theirs.to_json().decode() if theirs is not None else ""
        return refusal(ours, exclusion, Hello(node_rank=1, job=job))

    assert end(OURS, OURS) is end(None, OTHER) is end(OURS, None) is None
    refused = end(OURS, OTHER)
    assert refused is not None and refused.exit_code == 2
    assert "(trainer.learning_rate: 0.0001 -> 0.0002)" in refused.reason


def test_a_machine_whose_hardware_has_failed_is_sent_away_with_80(tmp_path: Path) -> None:
    session = FakeSession(tmp_path)
    exclusion = Exclusion(session.config, session.clock)
    exclusion.meet(1, "machine-b")
    exclusion.exclude({1: Failure(FailureKind.BAD_NODE, "CUDA error: uncorrectable ECC error")})
    refused = refusal(None, exclusion, Hello(node_rank=1, machine="machine-b"))
    assert refused is not None and refused.exit_code == 80 and "ECC" in refused.reason
    assert refusal(None, exclusion, Hello(node_rank=1, machine="machine-c")) is None


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
        listen(session, 2, lambda *_: None, OURS, Exclusion(session.config, session.clock), refused)


@pytest.mark.parametrize(
    ("bind", "host", "bound"),
    [(None, "", None), (None, "10.0.0.2", None), ("10.0.0.1", "", "10.0.0.1"), ("10.0.0.1", "10.0.0.2", "10.0.0.2")],
)
def test_a_node_that_leads_in_place_of_the_first_one_listens_on_its_own_address(
    bind: str | None, host: str, bound: str | None, tmp_path: Path
) -> None:
    """The same command everywhere gave it the first one's, and the run ended with a usage error."""
    session = FakeSession(tmp_path, nnodes=3, master_addr="10.0.0.1", master_port=29400, peer_bind=bind)
    asked: list[object] = []

    def opened(*_: object, **options: object) -> Any:
        asked.append(options["bind"])

    listen(session, None, lambda *_: None, OURS, Exclusion(session.config, session.clock), opened, host)
    assert asked == [bound]
