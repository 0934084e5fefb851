"""What a campaign has done and found."""

from __future__ import annotations

from dataclasses import dataclass, field

# Where the micro-batch was halved, sums are made in another order, and dropout falls otherwise: losses may differ by
# this share. The faults that do that strike in every so many-th run only, so that others are compared bit for bit.
HALVED_TOLERANCE = 0.02
# For a job that does not end in the same bits when nobody disturbs it, either (kernels that add in any order).
UNSTEADY_TOLERANCE = 1e-3


@dataclass
class Strike:
    """One fault, and what came of it."""

    fault: str
    moment: str
    run: int
    step: int
    what: str
    recovered_s: float | None = None
    violations: list[str] = field(default_factory=list)


@dataclass
class Result:
    """All that a campaign has found.

    Attributes:
        skipped: by fault, how often it could not strike, and why the last time.
        identical: runs under faults that ended in the same bits as the one in peace, of `runs`.
        close: others, whose micro-batch was halved, and whose losses were within HALVED_TOLERANCE of its.
        unsteady: the job ends in other bits each time, also in peace: compared within UNSTEADY_TOLERANCE.
        differences: what differed.
        lost_steps: computed again.
    """

    strikes: list[Strike] = field(default_factory=list)
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    runs: int = 0
    identical: int = 0
    close: int = 0
    unsteady: bool = False
    differences: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    lost_steps: int = 0
    steps: int = 0
    total_s: float = 0.0

    @property
    def all_violations(self) -> list[str]:
        struck = [
            f"run {strike.run}, {strike.fault} at step {strike.step}: {text}"
            for strike in self.strikes
            for text in strike.violations
        ]
        return struck + self.violations

    @property
    def well(self) -> bool:
        return not self.all_violations and self.identical + self.close == self.runs
