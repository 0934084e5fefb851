from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.storage.sidecars import LocalSidecars
from runner.recovery.bad_machines import (
    RECORD_NAME,
    VARIABLE,
    BadMachine,
    add_bad_machines,
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
