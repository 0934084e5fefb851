"""Which machines are remembered as bad, and who is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.node_fakes import FakeSession

from checkpointing.storage.sidecars import LocalSidecars
from runner.errors import BadMachineError, ExitCode
from runner.recovery.bad_machines import VARIABLE, BadMachine, add_bad_machines, read_bad_machines
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.excluded_machines import Exclusion, check_own_machine, exclude_own_machine

FAILED = Failure(FailureKind.BAD_NODE, "CUDA error: uncorrectable ECC error")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    monkeypatch.setenv(VARIABLE, "machine-a")
    return FakeSession(tmp_path, nnodes=3, master_addr="node0")


def recorded(session: FakeSession) -> list[str]:
    return [bad.machine for bad in read_bad_machines(session.config.tiers.durable.sidecars, session.clock())]


def test_the_next_leader_knows_it_too(session: FakeSession) -> None:
    exclusion = Exclusion(session)
    exclusion.meet(1, "machine-b")
    exclusion.exclude({1: FAILED})
    assert exclusion.refusal("machine-b") is not None and recorded(session) == ["machine-b"]
    successor = Exclusion(session)
    assert successor.refusal("machine-b") is None
    successor.load()
    assert successor.refusal("machine-b") is not None and successor.refusal("machine-c") is None


def test_nodes_that_share_a_machine_look_the_same(session: FakeSession) -> None:
    exclusion = Exclusion(session)
    exclusion.meet(1, "machine-b")
    exclusion.meet(2, "machine-b")
    exclusion.meet(3, "")
    exclusion.exclude({2: FAILED, 3: FAILED})
    assert recorded(session) == []


def test_the_leaders_own_machine_counts(session: FakeSession) -> None:
    Exclusion(session).exclude({0: FAILED})
    with pytest.raises(BadMachineError, match="ECC") as caught:
        check_own_machine(session.config, session.clock())
    assert caught.value.exit_code is ExitCode.BAD_NODE
    session.config.restart.exclude_hours = 0.0
    check_own_machine(session.config, session.clock())


def test_a_node_whose_gpus_fail_their_check_excludes_itself(session: FakeSession) -> None:
    exclude_own_machine(session, "GPU 3 computes wrong products")
    with pytest.raises(BadMachineError, match="GPU 3"):
        check_own_machine(session.config, session.clock())


def test_a_node_that_nobody_can_name_excludes_nobody(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.session.excluded_machines.this_machine", lambda: "")
    exclude_own_machine(session, "GPU 3 computes wrong products")
    monkeypatch.undo()
    session.config.restart.exclude_hours = 0.0
    exclude_own_machine(session, "GPU 3 computes wrong products")
    assert recorded(session) == []


def test_a_run_of_one_node_has_nowhere_else_to_go(session: FakeSession) -> None:
    Exclusion(session).exclude({0: FAILED})
    session.config.launch.nnodes = 1
    check_own_machine(session.config, session.clock())


def test_zero_hours_exclude_nobody(session: FakeSession) -> None:
    session.config.restart.exclude_hours = 0.0
    exclusion = Exclusion(session)
    exclusion.meet(1, "machine-b")
    exclusion.exclude({1: FAILED})
    assert exclusion.refusal("machine-b") is None and recorded(session) == []


def test_a_storage_that_refuses_leaves_what_this_runner_knows(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_bad_machines(session.config.tiers.durable.sidecars, [BadMachine("machine-c", 1e11)], session.clock())

    def refuse(*_: object) -> bytes:
        raise OSError("no route to host")

    monkeypatch.setattr(LocalSidecars, "read", refuse)
    exclusion = Exclusion(session)
    exclusion.load()
    exclusion.meet(1, "machine-b")
    exclusion.exclude({1: FAILED})
    assert exclusion.refusal("machine-b") is not None and exclusion.refusal("machine-c") is None
