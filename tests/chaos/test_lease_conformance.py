"""The code of the lease under the faults of its model: kills, stalls, lost answers, calls that are carried out late."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from chaos.stores import MemoryObjects
from helpers.calls import at_once

from checkpointing.storage.sidecars import ObjectSidecars
from runner.lease.lease import FIRST_NODE_S, Lease, LeaseClaim, LeaseRecord, LeaseWatch, newest_lease

NODES = 3


class Objects(MemoryObjects):
    """A store whose answers may be lost, and whose puts may be carried out late."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice
        self.troubled = True
        self.late: list[Callable[[], object]] = []

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        if self.troubled and self.dice.random() < 0.2:

            def call() -> bool:
                return MemoryObjects.put(self, key, data, if_absent=if_absent)

            match self.dice.choice(["carried out", "not carried out", "carried out later"]):
                case "carried out":
                    call()
                case "carried out later":
                    self.late.append(call)
            raise OSError("no answer")
        return super().put(key, data, if_absent=if_absent)


class Node:
    """A node, in all its lives."""

    def __init__(self, number: int, store: Objects, taken: dict[int, tuple[int, int]]) -> None:
        self.number, self.sidecars, self.taken = number, ObjectSidecars(store), taken
        self.life = 0
        self.keeper: Lease | None = None
        self.start()

    def start(self) -> None:
        """Start, perhaps once more."""
        self.life += 1
        claim = LeaseClaim(self.sidecars, f"node-{self.number}", self.number)
        self.keeper, self.watch = None, LeaseWatch(claim, at_once)
        newest = newest_lease(self.sidecars)
        if claim.leads_at_start(newest):
            try:
                lease = claim.take_after(newest, "host", "run")
            except OSError:
                return
            if lease is not None:
                self._lead(lease)

    def turn(self, now: float) -> None:
        if self.keeper is None:
            lease = self.watch.turn(now, has_state=self.number != 2, host=lambda: "host", run_id="run")
            if lease is not None:
                self._lead(lease)
            return
        self.keeper.turn(now)
        if self.keeper.replaced_by is not None:
            assert self.keeper.replaced_by.epoch > self.keeper.lease.epoch
            self.start()

    @property
    def leads(self) -> bool:
        return self.keeper is not None

    def _lead(self, lease: LeaseRecord) -> None:
        # No epoch has two leaders, in whatever life.
        assert self.taken.setdefault(lease.epoch, (self.number, self.life)) == (self.number, self.life)
        self.keeper = Lease(self.sidecars, lease, at_once)


@pytest.mark.parametrize("seed", range(150))
def test_one_leads_in_an_epoch_and_in_the_end_one_leads(seed: int) -> None:
    dice = random.Random(seed)
    store, now = Objects(dice), 0.0
    taken: dict[int, tuple[int, int]] = {}
    nodes = [Node(number, store, taken) for number in range(NODES)]
    for _ in range(400):
        # Nodes that are not chosen stand still.
        now += dice.choice([0.1, 0.5, 0.5, 2.0, 7.0])
        match dice.choices(["turn", "kill", "late"], [20, 1, 1])[0]:
            case "turn":
                dice.choice(nodes).turn(now)
            case "kill":
                dice.choice(nodes).start()
            case "late" if store.late:
                store.late.pop(dice.randrange(len(store.late)))()
    store.troubled = False
    for call in store.late:
        call()
    for _ in range(int(3 * FIRST_NODE_S / 0.5)):
        now += 0.5
        for node in nodes:
            node.turn(now)
    (leader,) = [node for node in nodes if node.leads]
    newest = newest_lease(leader.sidecars)
    assert newest is not None and taken[newest.epoch][0] == leader.number
    assert len(taken) > 3, "nothing happened"
