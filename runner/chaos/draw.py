"""Which fault is injected next, and at which moment."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from checkpointing.commit.tiers import Tiers
from runner.chaos.result import Result
from runner.chaos.scene import CampaignFailed, Fault, Moment


class FaultDraw:
    """Draws faults at random, all kinds equally often."""

    def __init__(self, faults: Sequence[Fault], random: Random, result: Result) -> None:
        """Keep the faults to draw from.

        Args:
            faults: The kinds of faults.
            random: Source of all choices.
            result: Counts what was injected; skipped faults are recorded there.
        """
        self._faults, self._random, self._result = list(faults), random, result

    def next(self, tiers: Tiers, *, may_halve: bool) -> tuple[Fault, Moment]:
        """Return a fault and its moment.

        Args:
            tiers: Storage of the run, which decides what is applicable.
            may_halve: Whether faults that halve the micro-batch are allowed.

        Raises:
            CampaignFailed: None of the faults is applicable to this storage.
        """
        fitting = [fault for fault in self._faults if fault.fits(tiers) and (may_halve or not fault.halves)]
        if not fitting:
            raise CampaignFailed(
                "none of the chosen faults applies to the storage of this job's checkpoints; choose others (--list)"
            )
        injected = [injection.fault for injection in self._result.injections]
        tries = {fault.name: injected.count(fault.name) + self._num_skipped(fault.name) for fault in fitting}
        least = min(tries.values())
        fault = self._random.choice([fault for fault in fitting if tries[fault.name] == least])
        return fault, self._random.choice(fault.moments)

    @property
    def all_halve(self) -> bool:
        """Whether every fault halves the micro-batch."""
        return all(fault.halves for fault in self._faults)

    def skip(self, fault: Fault, why: str) -> None:
        """Record that a drawn fault was not applicable."""
        self._result.skipped[fault.name] = (self._num_skipped(fault.name) + 1, why)

    def _num_skipped(self, name: str) -> int:
        return self._result.skipped.get(name, (0, ""))[0]
