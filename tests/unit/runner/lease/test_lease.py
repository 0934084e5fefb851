"""When a node leads, as a table of the lease that it sees and how long that has not changed; the records of leases."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos.stores import MemoryObjects
from helpers.calls import at_once

from checkpointing.storage.sidecars import LocalSidecars, ObjectSidecars, Sidecars
from runner.lease.lease import (
    EMPTY_HANDED_S,
    FIRST_NODE_S,
    LOOK_S,
    RENEW_S,
    STALE_S,
    Lease,
    LeaseClaim,
    LeaseRecord,
    LeaseWatch,
    newest_lease,
    own_address,
    renew,
    take,
)

LEADERS = LeaseRecord(1, "a", "a1", 0, "10.0.0.1", "run")


class Bench:
    """A node that watches; a turn every half second."""

    def __init__(self, node_rank: int = 1, *, background: Any = at_once) -> None:
        self.sidecars = ObjectSidecars(MemoryObjects())
        self.claim = LeaseClaim(self.sidecars, "b", node_rank, "b1")
        self.watch = LeaseWatch(self.claim, background)
        self.now = 100.0

    def turns(self, seconds: float, *, has_state: bool = True) -> LeaseRecord | None:
        until = self.now + seconds
        while self.now < until:
            taken = self.watch.turn(self.now, has_state=has_state, host=lambda: "10.0.0.2", run_id="run")
            self.now += 0.5
            if taken is not None:
                return taken
        return None


def test_where_nobody_has_led_only_the_first_node_begins() -> None:
    bench = Bench()
    assert bench.turns(1000) is None
    assert bench.claim.leads_at_start(None) is False
    assert LeaseClaim(bench.sidecars, "a", 0).leads_at_start(None) is True


@pytest.mark.parametrize(
    ("node_rank", "newest", "leads"),
    [
        (0, replace(LEADERS, holder="b"), True),  # it was killed, and is back
        (2, replace(LEADERS, holder="b", node_rank=2), True),
        # Nodes that share a volume have one output folder: each of them took the leader's lease for its own.
        (2, replace(LEADERS, holder="b"), False),
        (0, replace(LEADERS, holder="b", node_rank=1), False),
        (0, LEADERS, False),  # another node leads, or has been killed: its lease tells
        (1, LEADERS, False),
        (0, replace(LEADERS, released=True), True),
        # It led before the run was stopped: now the first node does, or there would be two.
        (1, replace(LEADERS, holder="b", node_rank=1, released=True), False),
        (1, replace(LEADERS, released=True), False),
        (0, LeaseRecord(3), False),  # damaged
    ],
)
def test_who_leads_at_its_start(node_rank: int, newest: LeaseRecord, leads: bool) -> None:
    assert Bench(node_rank).claim.leads_at_start(newest) is leads


def test_a_lease_that_is_renewed_is_left_alone_and_says_where_the_leader_is() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    for beat in range(20):
        renew(bench.sidecars, replace(LEADERS, beat=beat))
        assert bench.turns(RENEW_S) is None
    assert bench.watch.newest is not None and bench.watch.newest.host == "10.0.0.1"


def test_a_stale_lease_is_followed_by_ones_own() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    assert bench.turns(STALE_S - 0.5) is None
    taken = bench.turns(2 * LOOK_S + 1)
    assert taken == LeaseRecord(2, "b", "b1", 1, "10.0.0.2", "run") == newest_lease(bench.sidecars)


def test_a_node_without_a_snapshot_lets_others_go_first() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    assert bench.turns(STALE_S + EMPTY_HANDED_S - 0.5, has_state=False) is None
    assert bench.turns(2 * LOOK_S + 1, has_state=False) is not None


def test_the_one_that_is_not_the_first_follows_the_other() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    bench.turns(STALE_S - 0.5)
    theirs = LeaseRecord(2, "c", "c1", 2, "10.0.0.3", "run")
    take(bench.sidecars, theirs)
    assert bench.turns(2.0) is None
    assert bench.watch.newest == theirs


def test_a_race_has_one_winner() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    theirs = LeaseRecord(2, "c", "c1", 2)

    def raced(call: Callable[[], Any], name: str) -> Future[Any]:
        if call.__code__.co_name == "<lambda>" and "newest" in call.__code__.co_freevars:
            take(bench.sidecars, theirs)
        return at_once(call, name)

    bench.watch = LeaseWatch(bench.claim, raced)
    assert bench.turns(STALE_S + 3) is None
    assert newest_lease(bench.sidecars) == theirs == bench.watch.newest


def test_a_lease_that_was_handed_over_is_taken_at_once() -> None:
    bench = Bench()
    released = replace(LEADERS, epoch=4, released=True)
    take(bench.sidecars, released)
    bench.watch.followed(4)
    assert bench.turns(2.5) is not None


def test_after_a_run_was_stopped_the_first_node_leads_if_it_comes() -> None:
    bench, first = Bench(), Bench(0)
    for one in (bench, first):
        take(one.sidecars, replace(LEADERS, released=True))
    assert first.turns(2.5) is not None
    assert bench.turns(FIRST_NODE_S - 0.5) is None
    assert bench.turns(2 * LOOK_S + 1) is not None


def test_ones_own_lease_is_taken_again_at_once() -> None:
    bench = Bench()
    take(bench.sidecars, replace(LEADERS, holder="b", node_rank=1, session="before"))
    assert bench.turns(2.5) == LeaseRecord(2, "b", "b1", 1, "10.0.0.2", "run")


def test_the_lease_of_a_node_that_shares_the_folder_is_not_ones_own() -> None:
    bench = Bench()
    take(bench.sidecars, replace(LEADERS, holder="b"))
    for beat in range(10):
        assert bench.turns(RENEW_S) is None
        renew(bench.sidecars, replace(LEADERS, holder="b", beat=beat + 1))


def test_a_lease_whose_taking_was_not_answered_is_found() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)

    def unanswered(call: Callable[[], Any], name: str) -> Future[Any]:
        outcome = at_once(call, name)
        if isinstance(outcome.result(), LeaseRecord) and outcome.result().holder == "b" and not lost:
            lost.append(outcome.result())
            outcome = Future()
            outcome.set_exception(OSError("no answer"))
        return outcome

    lost: list[LeaseRecord] = []
    bench.watch = LeaseWatch(bench.claim, unanswered)
    taken = bench.turns(STALE_S + 4)
    assert taken is not None and [taken] == lost and taken.epoch == 2


def test_a_storage_that_is_away_makes_nobody_lead() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    away = False

    def background(call: Callable[[], Any], name: str) -> Future[Any]:
        def refused() -> None:
            raise OSError("no route to host")

        return at_once(refused if away else call, name)

    bench.watch = LeaseWatch(bench.claim, background)
    assert bench.turns(STALE_S - 1) is None
    away = True
    assert bench.turns(60) is None
    away = False
    # It was away for the leader too: the time counts from now.
    assert bench.turns(STALE_S - 1.5) is None
    assert bench.turns(3.5) is not None


def test_a_leader_that_is_heard_again_resets_the_time() -> None:
    bench = Bench()
    take(bench.sidecars, LEADERS)
    bench.turns(STALE_S - 1)
    bench.watch.followed(1)
    assert bench.turns(STALE_S - 1) is None


# -- the holder ------------------------------------------------------------------------------------------------------


def keeper_of(bench: Bench, background: Any = at_once) -> Lease:
    take(bench.sidecars, LEADERS)
    return Lease(bench.sidecars, LEADERS, background)


def test_a_holder_renews_its_lease() -> None:
    bench = Bench()
    keeper = keeper_of(bench)
    for turn in range(21):
        keeper.turn(100 + turn / 2)
    renewed = newest_lease(bench.sidecars)
    assert renewed is not None and renewed.beat == 10 / RENEW_S + 1 and keeper.replaced_by is None


def test_a_holder_that_was_replaced_finds_that_out() -> None:
    bench = Bench()
    keeper, theirs = keeper_of(bench), LeaseRecord(2, "c")
    take(bench.sidecars, theirs)
    for turn in range(3):
        keeper.turn(100 + turn / 2)
    assert keeper.replaced_by == theirs
    keeper.release(1.0)
    assert newest_lease(bench.sidecars) == theirs


def test_a_holder_that_is_fenced_asks_at_once() -> None:
    bench = Bench()
    keeper, theirs = keeper_of(bench), LeaseRecord(2, "c")
    assert keeper.look(1.0) is None
    take(bench.sidecars, theirs)
    assert keeper.look(1.0) == theirs


def test_a_storage_that_hangs_or_refuses_replaces_nobody() -> None:
    bench = Bench()
    hangs: Future[Any] = Future()
    keeper = keeper_of(bench, lambda call, name: hangs)
    for turn in range(20):
        keeper.turn(100 + turn)
    assert keeper.replaced_by is None and keeper.look(0.01) is None
    keeper.release(0.01)
    hangs.set_exception(OSError("refused"))
    keeper.turn(200)
    assert keeper.replaced_by is None and keeper.look(0.01) is None


def test_a_release_comes_after_the_last_renewal() -> None:
    bench = Bench()
    calls: list[tuple[Callable[[], Any], Future[Any]]] = []

    def later(call: Callable[[], Any], name: str) -> Future[Any]:
        calls.append((call, Future()))
        return calls[-1][1]

    keeper = keeper_of(bench, later)
    keeper.turn(100)
    ((renewal, outcome),) = calls

    def release(call: Callable[[], Any], name: str) -> Future[Any]:
        outcome.set_result(renewal())
        return at_once(call, name)

    keeper._background = release
    keeper.release(1.0)
    newest = newest_lease(bench.sidecars)
    assert newest is not None and newest.released


def test_a_node_is_known_by_its_address_on_the_way_to_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    assert own_address("no.such.host.invalid") == "me"


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
