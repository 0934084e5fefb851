"""Which node leads an elastic run: the lease, a numbered record kept with the checkpoints.

A node leads in epoch n if it has created the lease of n, which of several nodes exactly one can do
(`Sidecars.create`). The newest lease counts. Its holder renews it; the others take the next epoch when they have lost
the holder and its lease has not changed for a while. No clock is compared with another, and no time-out is trusted: a
holder that was only slow finds the newer lease when it renews its own, and the fence of the next attempt keeps it from
committing meanwhile. tests/chaos/lease_model.py explores the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from checkpointing.storage.sidecars import Sidecars

_PREFIX = "lease-"
_NAME = re.compile(rf"{_PREFIX}(\d{{1,15}})\Z")
# Of older epochs, so many are kept: a slow holder may still write its own.
_KEPT = 3


@dataclass(frozen=True)
class LeaseRecord:
    """One epoch's lease.

    Attributes:
        epoch: Its number, from 1.
        holder: Identity of the leader's folder, which survives a restart of its runner.
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
    """Return the newest lease; None if there is none.

    One that cannot be parsed has no holder, so that the next epoch can be taken.

    Raises:
        OSError: Storage refused.
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
    """Take an epoch; may be repeated after an error.

    Returns:
        Whether this very lease is the epoch's; False if another node was first.

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
    """Write the holder's lease again.

    Returns:
        The newer lease that has replaced it; None if there is none.

    Raises:
        OSError: Storage refused.
    """
    newest = newest_lease(sidecars)
    if newest is not None and newest.epoch > lease.epoch:
        return newest
    sidecars.write(f"{_PREFIX}{lease.epoch}", lease.to_json())
    return None


def _epochs(sidecars: Sidecars) -> list[int]:
    return sorted(int(match.group(1)) for name in sidecars.sizes(_PREFIX) if (match := _NAME.match(name)))
