"""Which node leads an elastic run: the lease, a numbered record kept with the checkpoints.

A node leads in epoch n if it has created the lease of n, which of several nodes exactly one can do
(`Sidecars.create`). The newest lease counts. Its holder renews it; the others take the next epoch when they have lost
the holder and its lease has not changed for a while. No clock is compared with another, and no time-out is trusted: a
holder that was only slow finds the newer lease when it renews its own, and the fence of the next attempt keeps it from
committing meanwhile. tests/chaos/lease_model.py explores the rules.

Nothing here waits: storage is asked in threads that may be abandoned, as a server that does not answer blocks for long.
"""

from __future__ import annotations

import contextlib
import re
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from checkpointing.host.threads import in_background
from checkpointing.storage.sidecars import Sidecars

_PREFIX = "lease-"
_NAME = re.compile(rf"{_PREFIX}(\d{{1,15}})\Z")
# Of older epochs, so many are kept: a slow holder may still write its own.
_KEPT = 3
# Between two renewals, and between two looks at the lease while there is no leader.
RENEW_S = 2.0
LOOK_S = 1.0
# A lease that has not changed for so long is stale: its holder has missed three renewals.
STALE_S = 6.0
# The nodes with a snapshot of the run come first.
EMPTY_HANDED_S = 2.0
# After a run was stopped the first node leads again, if it is there.
FIRST_NODE_S = 20.0

# Starts a call in a thread with a name; `in_background` by default.
Background = Callable[[Callable[[], Any], str], Future[Any]]


@dataclass(frozen=True)
class LeaseRecord:
    """One epoch's lease.

    Attributes:
        epoch: Its number, from 1.
        holder: Identity of the leader's output folder, which survives a restart of its runner.
        session: Identity of the leader's process.
        node_rank: Node rank of the leader.
        host: Address of the leader, for the other nodes.
        run_id: Identity of the run on its nodes.
        beat: Times that it was renewed.
        released: Whether the holder has ended and does not lead any more.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    epoch: Annotated[int, Field(ge=0, lt=2**53)]
    holder: Annotated[str, Field(max_length=200)] = ""
    session: Annotated[str, Field(max_length=200)] = ""
    node_rank: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    host: Annotated[str, Field(max_length=300)] = ""
    run_id: Annotated[str, Field(max_length=100)] = ""
    beat: Annotated[int, Field(ge=0, lt=2**53)] = 0
    released: bool = False

    def to_json(self) -> bytes:
        """Return the lease as JSON."""
        return _ADAPTER.dump_json(self)


_ADAPTER: TypeAdapter[LeaseRecord] = TypeAdapter(LeaseRecord)


def newest_lease(sidecars: Sidecars) -> LeaseRecord | None:
    """Return the newest lease; None if there is none. Raises OSError if storage refused.

    One that cannot be parsed has no holder, so that the next epoch can be taken.
    """
    epochs = _epochs(sidecars)
    if not epochs:
        return None
    try:
        lease = _ADAPTER.validate_json(sidecars.read(f"{_PREFIX}{epochs[-1]}"))
    except ValidationError:
        return LeaseRecord(epochs[-1])
    return lease if lease.epoch == epochs[-1] else LeaseRecord(epochs[-1])


def take(sidecars: Sidecars, lease: LeaseRecord) -> bool:
    """Take an epoch; may be repeated after an error. False if another node was first.

    Raises:
        OSError: Storage refused, or did not answer: the lease may be taken all the same.
    """
    if not sidecars.create(f"{_PREFIX}{lease.epoch}", lease.to_json()):
        return False
    for older in _epochs(sidecars):
        if older <= lease.epoch - _KEPT:
            sidecars.remove(f"{_PREFIX}{older}")
    return True


def renew(sidecars: Sidecars, lease: LeaseRecord) -> LeaseRecord | None:
    """Write the holder's lease again; returns the newer lease that has replaced it, None if there is none.

    Raises OSError if storage refused.
    """
    newest = newest_lease(sidecars)
    if newest is not None and newest.epoch > lease.epoch:
        return newest
    sidecars.write(f"{_PREFIX}{lease.epoch}", lease.to_json())
    return None


def _epochs(sidecars: Sidecars) -> list[int]:
    return sorted(int(match.group(1)) for name in sidecars.sizes(_PREFIX) if (match := _NAME.match(name)))


@dataclass(frozen=True)
class LeaseClaim:
    """A node that may lead, with the sidecars of the durable tier, which all nodes see.

    Attributes:
        holder: Identity of this node's output folder, which other nodes of the run may share.
        session: Identity of this process.
    """

    sidecars: Sidecars
    holder: str
    node_rank: int
    session: str = field(default_factory=lambda: uuid.uuid4().hex)

    def holds(self, lease: LeaseRecord) -> bool:
        """Return whether a lease is that of this node, perhaps of an earlier process of it."""
        return (lease.holder, lease.node_rank) == (self.holder, self.node_rank)

    def leads_at_start(self, newest: LeaseRecord | None) -> bool:
        """Return whether a node that has just been started leads, given the newest lease.

        A node that has the lease was killed, and is back. Where a run was never started, or was stopped, nobody has it,
        and it is for the first node to lead.
        """
        if newest is None or newest.released:
            return self.node_rank == 0
        return self.holds(newest)

    def take_after(self, newest: LeaseRecord | None, host: str, run_id: str) -> LeaseRecord | None:
        """Take the lease after the newest one, with the address of this node; None if another node was first.

        Raises OSError as `take` does.
        """
        epoch = newest.epoch + 1 if newest is not None else 1
        lease = LeaseRecord(epoch, self.holder, self.session, self.node_rank, host, run_id)
        return lease if take(self.sidecars, lease) else None


class Lease:
    """Renews the lease of a node that leads.

    Attributes:
        lease: As it was renewed last.
        replaced_by: The newer lease of another node; None as long as this one leads.
    """

    def __init__(self, sidecars: Sidecars, lease: LeaseRecord, background: Background = in_background) -> None:
        self._sidecars, self._background = sidecars, background
        self.lease = lease
        self.replaced_by: LeaseRecord | None = None
        self._renewing: Future[LeaseRecord | None] | None = None
        self._renewed_at = float("-inf")

    def turn(self, now: float) -> None:
        """Renew the lease now and then; `now` is monotonic seconds."""
        if self._renewing is not None:
            if not self._renewing.done():
                return
            # A storage that does not answer says nothing about who leads; the next turn asks again.
            if self._renewing.exception() is None:
                self.replaced_by = self._renewing.result()
            self._renewing = None
        if self.replaced_by is None and now - self._renewed_at >= RENEW_S:
            self._renewed_at = now
            renewed = self.lease = replace(self.lease, beat=self.lease.beat + 1)
            self._renewing = self._background(lambda: renew(self._sidecars, renewed), "lease")

    def look(self, timeout_s: float) -> LeaseRecord | None:
        """Return the newer lease of another node, asking storage for it; None if there is none, or no answer."""
        if self.replaced_by is None:
            outcome = self._background(lambda: newest_lease(self._sidecars), "lease")
            try:
                newest: LeaseRecord | None = outcome.result(timeout_s)
            except OSError:
                return None
            if newest is not None and newest.epoch > self.lease.epoch:
                self.replaced_by = newest
        return self.replaced_by

    def release(self, timeout_s: float) -> None:
        """Record that this node does not lead any more; gives up after `timeout_s` seconds."""
        if self.replaced_by is not None:
            return
        released = self.lease = replace(self.lease, released=True)
        before = self._renewing

        def work() -> None:
            # A renewal on its way would undo the release.
            if before is not None:
                before.exception(timeout_s)
            renew(self._sidecars, released)

        with contextlib.suppress(TimeoutError):
            self._background(work, "lease").exception(timeout_s)


class LeaseWatch:
    """What a node without a leader learns from the lease: where the leader is, or that it should lead itself.

    Attributes:
        newest: The newest lease when it was looked at last; None before, and if there is none.
    """

    def __init__(self, claim: LeaseClaim, background: Background = in_background) -> None:
        self._claim, self._background = claim, background
        self.newest: LeaseRecord | None = None
        self._since = 0.0
        self._looked_at = float("-inf")
        self._looking: Future[LeaseRecord | None] | None = None
        self._taking: Future[LeaseRecord | None] | None = None
        self._followed_epoch = 0

    def followed(self, epoch: int) -> None:
        """Note that this node is connected to a leader; `epoch` is 0 if that has no lease."""
        self._followed_epoch = epoch
        self.newest, self._looking = None, None
        self._looked_at = float("-inf")

    def turn(self, now: float, *, has_state: bool, host: Callable[[], str], run_id: str) -> LeaseRecord | None:
        """Look at the lease, and take the next one where its holder is gone; called about twice per second.

        Args:
            now: Monotonic seconds.
            has_state: Whether this node may hold a snapshot of the run.
            host: Returns the address of this node for the others; called in a thread.
            run_id: Identity of the run on its nodes.

        Returns:
            The lease that this node has taken; None as long as it has none.
        """
        if self._taking is not None:
            if not self._taking.done():
                return None
            taking, self._taking = self._taking, None
            if taking.exception() is None and (taken := taking.result()) is not None:
                return taken
        if self._looking is not None and self._looking.done():
            looking, self._looking = self._looking, None
            if looking.exception() is not None:
                # While storage is away, its holder cannot renew it either.
                self._since = now
            else:
                if looking.result() != self.newest:
                    self.newest, self._since = looking.result(), now
                if self.newest is not None and self.newest.session == self._claim.session:
                    # An answer was lost, the call was carried out.
                    return self.newest
                if self._is_vacant(now, has_state=has_state):
                    claim, newest = self._claim, self.newest
                    self._taking = self._background(lambda: claim.take_after(newest, host(), run_id), "lease")
                    return None
        if self._looking is None and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            sidecars = self._claim.sidecars
            self._looking = self._background(lambda: newest_lease(sidecars), "lease")
        return None

    def _is_vacant(self, now: float, *, has_state: bool) -> bool:
        lease = self.newest
        if lease is None:
            # Only the first node begins a run.
            return False
        if self._claim.holds(lease) and not lease.released:
            return True
        patience_s = STALE_S
        if lease.released:
            handed_over = 0 < lease.epoch == self._followed_epoch
            patience_s = 0.0 if handed_over or self._claim.node_rank == 0 else FIRST_NODE_S
        return now - self._since >= patience_s + (0.0 if has_state else EMPTY_HANDED_S)


def own_address(towards: str) -> str:
    """Return the address by which a host, and so its network, knows this one; its name where that is unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return socket.gethostname()
