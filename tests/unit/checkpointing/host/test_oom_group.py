"""`memory.oom.group` of cgroup v2, in folders of the test's own: machines with version 1 have no such file."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.host import memory
from runner.doctor import machine_checks as node
from runner.doctor.findings import Level, warn


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a container: its cgroup is what it sees as the root."""
    monkeypatch.setattr(memory, "_CGROUPS", [(tmp_path, "memory.max", "memory.current", "memory.events")])
    (tmp_path / "memory.oom.group").write_text("1\n")
    return tmp_path / "memory.oom.group"


def test_one_process_is_ended_at_a_time_where_that_can_be_set(group: Path) -> None:
    assert memory.oom_groups() == [group]
    (finding,) = node._oom_groups()
    assert finding.level is Level.OK and "sets it to 0" in finding.text
    memory.separate_oom_kills()
    assert memory.oom_groups() == []
    assert group.read_text().startswith("0")
    assert not list(node._oom_groups())


def test_a_container_that_may_not_set_it_is_warned(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everything here; a container's mount is read-only."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (finding,) = node._oom_groups()
    assert finding.level is Level.WARN and str(group) in finding.text
    advice = "set singleProcessOOMKill: true in the kubelet's configuration (Kubernetes 1.32 or newer)"
    assert finding == warn("oom group", finding.text, advice)


def test_nothing_is_made_where_there_is_no_such_file(group: Path) -> None:
    group.unlink()
    memory.separate_oom_kills()
    assert memory.oom_groups() == []
    assert not group.exists()
