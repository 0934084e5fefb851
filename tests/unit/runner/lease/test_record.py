"""The records of who leads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chaos.stores import MemoryObjects

from checkpointing.storage.local_sidecars import LocalSidecars
from checkpointing.storage.object_storage import ObjectSidecars
from checkpointing.storage.sidecars import Sidecars
from runner.lease.record import LeaseRecord, newest_lease, renew, take

FIRST = LeaseRecord(1, "a", "a1", 0, "10.0.0.1", "run")


@pytest.fixture(params=["local", "objects"])
def sidecars(request: pytest.FixtureRequest, tmp_path: Path) -> Sidecars:
    if request.param == "local":
        return LocalSidecars(tmp_path, may_create=lambda: True)
    return ObjectSidecars(MemoryObjects())


def test_an_epoch_is_taken_once(sidecars: Sidecars) -> None:
    assert newest_lease(sidecars) is None
    assert take(sidecars, FIRST)
    assert not take(sidecars, LeaseRecord(1, "b", "b1", 1))
    assert newest_lease(sidecars) == FIRST


def test_taking_it_again_after_an_answer_was_lost_succeeds(sidecars: Sidecars) -> None:
    assert take(sidecars, FIRST) and take(sidecars, FIRST)


def test_a_holder_that_was_slow_finds_the_newer_lease_and_changes_nothing(sidecars: Sidecars) -> None:
    second = LeaseRecord(2, "b", "b1", 1)
    assert take(sidecars, FIRST) and renew(sidecars, replace(FIRST, beat=1)) is None
    assert newest_lease(sidecars) == replace(FIRST, beat=1)
    assert take(sidecars, second)
    assert renew(sidecars, replace(FIRST, beat=2)) == second
    assert newest_lease(sidecars) == second


def test_a_renewal_that_arrives_late_does_not_count(sidecars: Sidecars) -> None:
    take(sidecars, FIRST)
    take(sidecars, LeaseRecord(2, "b"))
    sidecars.write("lease-1", replace(FIRST, beat=9).to_json())
    assert newest_lease(sidecars) == LeaseRecord(2, "b")


def test_old_leases_are_removed(sidecars: Sidecars) -> None:
    for epoch in range(1, 9):
        assert take(sidecars, LeaseRecord(epoch, "a"))
    assert list(sidecars.sizes("lease-")) == ["lease-6", "lease-7", "lease-8"]


@pytest.mark.parametrize("data", [b"", b"torn", b"{}", b'{"epoch": 1}', b'{"epoch": "2"}', b"[" * 10_000])
def test_a_damaged_lease_has_no_holder_and_is_followed_by_the_next(sidecars: Sidecars, data: bytes) -> None:
    sidecars.write("lease-2", data)
    sidecars.write("lease-x", b"of somebody else")
    assert newest_lease(sidecars) == LeaseRecord(2)
    assert take(sidecars, LeaseRecord(3, "b"))


def test_fields_of_a_newer_version_are_ignored(sidecars: Sidecars) -> None:
    sidecars.write("lease-1", FIRST.to_json()[:-1] + b', "zone": "b"}')
    assert newest_lease(sidecars) == FIRST
