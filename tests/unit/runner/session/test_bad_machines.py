from __future__ import annotations

from pathlib import Path

import pytest
from helpers.node_fakes import FakeSession

from checkpointing.storage.sidecars import LocalSidecars
from runner.errors import BadMachineError, ExitCode
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.bad_machines import (
    RECORD_NAME,
    VARIABLE,
    BadMachine,
    Exclusion,
    add_bad_machines,
    check_own_machine,
    exclude_own_machine,
    read_bad_machines,
    refusal,
    this_machine,
)


@pytest.fixture
def sidecars(tmp_path: Path) -> LocalSidecars:
    return LocalSidecars(tmp_path, may_create=lambda: True)


def test_a_machine_is_named_by_its_boot_or_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert this_machine() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    monkeypatch.setenv(VARIABLE, " gpu-17 ")
    assert this_machine() == "gpu-17"


def test_a_machine_is_excluded_until_its_time_is_over(sidecars: LocalSidecars) -> None:
    add_bad_machines(sidecars, [BadMachine("a", 200.0, "ECC error")], 100.0)
    add_bad_machines(sidecars, [BadMachine("b", 300.0)], 100.0)
    add_bad_machines(sidecars, [BadMachine("a", 250.0, "fell off the bus")], 100.0)
    found = read_bad_machines(sidecars, 100.0)
    assert [(bad.machine, bad.until) for bad in found] == [("b", 300.0), ("a", 250.0)]
    assert "fell off the bus; it is not used for another 0.0 h" in (refusal(found, "a", 240.0) or "")
    assert refusal(found, "a", 250.0) is refusal(found, "c", 100.0) is None
    assert [bad.machine for bad in read_bad_machines(sidecars, 260.0)] == ["b"]


@pytest.mark.parametrize("data", [b"", b"torn", b"{}", b'[{"machine": 1}]', b'[{"machine": "a"}]', b"[" * 10_000])
def test_a_damaged_record_excludes_nobody(sidecars: LocalSidecars, data: bytes) -> None:
    sidecars.write(RECORD_NAME, data)
    assert read_bad_machines(sidecars, 1.0) == []
    add_bad_machines(sidecars, [BadMachine("a", 2.0)], 1.0)
    assert len(read_bad_machines(sidecars, 1.0)) == 1


FAILED = Failure(FailureKind.BAD_NODE, "CUDA error: uncorrectable ECC error")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    monkeypatch.setenv(VARIABLE, "machine-a")
    return FakeSession(tmp_path, nnodes=3, master_addr="node0")


def recorded(session: FakeSession) -> list[str]:
    return [bad.machine for bad in read_bad_machines(session.config.tiers.durable.sidecars, session.clock())]


def test_the_next_leader_knows_it_too(session: FakeSession) -> None:
    exclusion = Exclusion(session.config, session.clock)
    exclusion.meet(1, "machine-b")
    exclusion.exclude({1: FAILED})
    assert exclusion.refusal("machine-b") is not None and recorded(session) == ["machine-b"]
    successor = Exclusion(session.config, session.clock)
    assert successor.refusal("machine-b") is None
    successor.load()
    assert successor.refusal("machine-b") is not None and successor.refusal("machine-c") is None


def test_nodes_that_share_a_machine_look_the_same(session: FakeSession) -> None:
    exclusion = Exclusion(session.config, session.clock)
    exclusion.meet(1, "machine-b")
    exclusion.meet(2, "machine-b")
    exclusion.meet(3, "")
    exclusion.exclude({2: FAILED, 3: FAILED})
    assert recorded(session) == []


def test_the_leaders_own_machine_counts(session: FakeSession) -> None:
    Exclusion(session.config, session.clock).exclude({0: FAILED})
    with pytest.raises(BadMachineError, match="ECC") as caught:
        check_own_machine(session.config, session.clock())
    assert caught.value.exit_code is ExitCode.BAD_NODE
    session.config.restart.exclude_hours = 0.0
    check_own_machine(session.config, session.clock())


def test_a_node_whose_gpus_fail_their_check_excludes_itself(session: FakeSession) -> None:
    exclude_own_machine(session.config, "GPU 3 computes wrong products", session.clock())
    with pytest.raises(BadMachineError, match="GPU 3"):
        check_own_machine(session.config, session.clock())


def test_a_node_that_nobody_can_name_excludes_nobody(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.session.bad_machines.this_machine", lambda: "")
    exclude_own_machine(session.config, "GPU 3 computes wrong products", session.clock())
    monkeypatch.undo()
    session.config.restart.exclude_hours = 0.0
    exclude_own_machine(session.config, "GPU 3 computes wrong products", session.clock())
    assert recorded(session) == []


def test_a_run_of_one_node_has_nowhere_else_to_go(session: FakeSession) -> None:
    Exclusion(session.config, session.clock).exclude({0: FAILED})
    session.config.launch.nnodes = 1
    check_own_machine(session.config, session.clock())


def test_zero_hours_exclude_nobody(session: FakeSession) -> None:
    session.config.restart.exclude_hours = 0.0
    exclusion = Exclusion(session.config, session.clock)
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
    exclusion = Exclusion(session.config, session.clock)
    exclusion.load()
    exclusion.meet(1, "machine-b")
    exclusion.exclude({1: FAILED})
    assert exclusion.refusal("machine-b") is not None and exclusion.refusal("machine-c") is None
