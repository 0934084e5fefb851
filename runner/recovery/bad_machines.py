"""Machines whose hardware has failed in a run: kept with its checkpoints, and not admitted again for a while."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from checkpointing.storage.sidecars import Sidecars

VARIABLE = "RUNNER_MACHINE"
RECORD_NAME = "bad-machines.json"
_MAX_MACHINES = 1000
_MAX_CAUSE = 2000


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
