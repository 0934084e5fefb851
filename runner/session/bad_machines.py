"""Machines that are bad: kept with the checkpoints of a run, and not admitted to it again for a while.

Why a machine counts as bad is decided where it is seen: an error of its hardware (`FailureKind.BAD_NODE` in
`runner/recovery/kinds.py`), memory that has changed twice or ranks that survive SIGKILL (`runner/node/attempt.py`),
GPUs that fail their check (`runner/node/health_check.py`), and ranks that stay slow
(`runner/supervisor/node_changes.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from checkpointing.errors import CheckpointError
from checkpointing.host.threads import in_background
from checkpointing.storage.sidecars import Sidecars
from runner.config.schema import Config
from runner.errors import BadMachineError
from runner.recovery.failure import Failure

VARIABLE = "RUNNER_MACHINE"
RECORD_NAME = "bad-machines.json"
_MAX_MACHINES = 1000
_MAX_CAUSE = 2000
# For storage; what is not recorded then is remembered until this runner ends.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class BadMachine:
    """A machine (see `this_machine`) that is not to be used until then, in seconds since the epoch, and why."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    machine: Annotated[str, Field(max_length=200)]
    until: Annotated[float, Field(ge=0, lt=1e12)]
    cause: Annotated[str, Field(max_length=_MAX_CAUSE)] = ""

    @classmethod
    def for_hours(cls, hours: float, machine: str, cause: str, now: float) -> BadMachine:
        """Return a machine that is not to be used for so many hours from `now`."""
        return cls(machine, now + 3600 * hours, cause[:_MAX_CAUSE])


_ADAPTER: TypeAdapter[Any] = TypeAdapter(list[BadMachine])


def this_machine() -> str:
    """Return the identity of this machine: RUNNER_MACHINE, or the id of its kernel's boot.

    Containers of one machine share the boot's id, whatever they are called, and a reboot gives it another one: a GPU
    that has fallen off the bus is often back then.
    """
    if configured := os.environ.get(VARIABLE, "").strip():
        return configured
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_bad_machines(sidecars: Sidecars, now: float) -> list[BadMachine]:
    """Return the machines that are not to be used now; none if the record in the durable tier cannot be parsed.

    Raises:
        OSError: Storage refused.
    """
    try:
        found: list[BadMachine] = _ADAPTER.validate_json(sidecars.read(RECORD_NAME) or b"[]")
    except ValidationError:
        return []
    return [bad for bad in found if bad.until > now]


def add_bad_machines(sidecars: Sidecars, bad: Sequence[BadMachine], now: float) -> None:
    """Record machines that are not to be used, in the durable tier.

    Raises:
        OSError: Storage refused.
    """
    named = {one.machine for one in bad}
    known = [one for one in read_bad_machines(sidecars, now) if one.machine not in named]
    sidecars.write(RECORD_NAME, _ADAPTER.dump_json([*known, *bad][-_MAX_MACHINES:]))


def refusal(bad: Sequence[BadMachine], machine: str, now: float) -> str | None:
    """Return why a machine is not to be used; None if it may be."""
    found = next((one for one in bad if one.machine == machine and one.until > now), None)
    if found is None:
        return None
    hours = (found.until - now) / 3600
    return (
        f"this machine ({machine}) has failed in this run: {found.cause}; it is not used for another {hours:.1f} h "
        "(restart.exclude_hours); start on another machine, or reboot this one"
    )


class Exclusion:
    """The bad machines of a run, as its leader knows them; `load` reads those of earlier sessions."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._clock, self._sidecars, self._hours = clock, config.tiers.durable.sidecars, config.restart.exclude_hours
        self._bad: list[BadMachine] = []
        # By node rank, of the nodes that have connected.
        self._machines: dict[int, str] = {config.launch.node_rank: this_machine()}

    def load(self) -> None:
        """Read what earlier sessions have recorded; what cannot be read excludes nobody."""
        with contextlib.suppress(OSError, CheckpointError):
            self._bad = read_bad_machines(self._sidecars, self._clock())

    def meet(self, node_rank: int, machine: str) -> None:
        """Take in on which machine a node is."""
        self._machines[node_rank] = machine

    def refusal(self, machine: str) -> str | None:
        """Return why a machine is not admitted; None if it is."""
        return refusal(self._bad, machine, self._clock()) if self._hours else None

    def exclude(self, failures: Mapping[int, Failure]) -> None:
        """Record the machines of nodes whose hardware has failed: by node rank, how an attempt ended there."""
        now = self._clock()
        machines = list(self._machines.values())
        bad = [
            BadMachine.for_hours(self._hours, machine, failure.cause, now)
            for number, failure in failures.items()
            # Several nodes on one machine look the same, and one of them may be sound.
            if (machine := self._machines.get(number, "")) and machines.count(machine) == 1
        ]
        if not bad or not self._hours:
            return
        self._bad += bad
        _remember(self._sidecars, bad, now)


def exclude_own_machine(config: Config, cause: str, now: float) -> None:
    """Record that this machine is not to be used, because of a fault that nobody else can report."""
    hours, machine = config.restart.exclude_hours, this_machine()
    if hours and machine:
        _remember(config.tiers.durable.sidecars, [BadMachine.for_hours(hours, machine, cause, now)], now)


def _remember(sidecars: Sidecars, bad: Sequence[BadMachine], now: float) -> None:
    with contextlib.suppress(TimeoutError):
        in_background(lambda: add_bad_machines(sidecars, bad, now), "bad-machines").exception(_PATIENCE_S)


def check_own_machine(config: Config, now: float) -> None:
    """Check that this machine may be used in a run of several nodes; BadMachineError if its hardware failed there."""
    if config.launch.nnodes == 1 or not config.restart.exclude_hours:
        return
    why = refusal(read_bad_machines(config.tiers.durable.sidecars, now), this_machine(), now)
    if why is not None:
        raise BadMachineError(why)
