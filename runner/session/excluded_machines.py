"""Which machines a run of several nodes does not admit, because their hardware has failed in it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from checkpointing.errors import CheckpointError
from checkpointing.host.threads import in_background
from checkpointing.storage.sidecars import Sidecars
from runner.config.schema import Config
from runner.errors import BadMachineError
from runner.recovery.bad_machines import BadMachine, add_bad_machines, read_bad_machines, refusal, this_machine
from runner.recovery.failure import Failure
from runner.session.session import Session

# For storage; what is not recorded then is remembered until this runner ends.
_PATIENCE_S = 5.0


class Exclusion:
    """The bad machines of a run, as its leader knows them; `load` reads those of earlier sessions."""

    def __init__(self, session: Session) -> None:
        self._session, self._sidecars = session, session.config.tiers.durable.sidecars
        self._hours = session.config.restart.exclude_hours
        self._bad: list[BadMachine] = []
        # By node rank, of the nodes that have connected.
        self._machines: dict[int, str] = {session.config.launch.node_rank: this_machine()}

    def load(self) -> None:
        """Read what earlier sessions have recorded; what cannot be read excludes nobody."""
        with contextlib.suppress(OSError, CheckpointError):
            self._bad = read_bad_machines(self._sidecars, self._session.clock())

    def meet(self, node_rank: int, machine: str) -> None:
        """Take in on which machine a node is."""
        self._machines[node_rank] = machine

    def refusal(self, machine: str) -> str | None:
        """Return why a machine is not admitted; None if it is."""
        return refusal(self._bad, machine, self._session.clock()) if self._hours else None

    def exclude(self, failures: Mapping[int, Failure]) -> None:
        """Record the machines of nodes whose hardware has failed: by node rank, how an attempt ended there."""
        now = self._session.clock()
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


def exclude_own_machine(session: Session, cause: str) -> None:
    """Record that this machine is not to be used, because of a fault that nobody else can report."""
    hours, machine, now = session.config.restart.exclude_hours, this_machine(), session.clock()
    if hours and machine:
        _remember(session.config.tiers.durable.sidecars, [BadMachine.for_hours(hours, machine, cause, now)], now)


def _remember(sidecars: Sidecars, bad: Sequence[BadMachine], now: float) -> None:
    with contextlib.suppress(TimeoutError):
        in_background(lambda: add_bad_machines(sidecars, bad, now), "bad-machines").exception(_PATIENCE_S)


def check_own_machine(config: Config, now: float) -> None:
    """Check that this machine may be used for a run of several nodes.

    Raises:
        BadMachineError: Its hardware has failed in this run.
        OSError: Storage refused.
    """
    if config.launch.nnodes == 1 or not config.restart.exclude_hours:
        return
    why = refusal(read_bad_machines(config.tiers.durable.sidecars, now), this_machine(), now)
    if why is not None:
        raise BadMachineError(why)
