"""What a campaign injected and found."""

from __future__ import annotations

from dataclasses import dataclass, field

# Halving the micro-batch changes the order of sums and the dropout masks, so losses may differ by this share. Only
# every few runs get faults that halve it, so that all others are compared bit for bit.
HALVED_TOLERANCE = 0.02
# For a job that is not bit-identical without faults either, because its kernels add in any order.
NONDETERMINISTIC_TOLERANCE = 1e-3


@dataclass
class Injection:
    """One injected fault and its consequences.

    Attributes:
        fault: Name of the fault.
        moment: When it was injected, as a value of `Moment`.
        run: Number of the run, from 1.
        step: Last step that the journal knew at that time.
        what: What was done, in words.
        recovered_s: Seconds until the run made progress again; None if the fault ends nothing, or it never did.
        violations: Invariants that did not hold afterwards, in words.
    """

    fault: str
    moment: str
    run: int
    step: int
    what: str
    recovered_s: float | None = None
    violations: list[str] = field(default_factory=list)


@dataclass
class Result:
    """Everything that a campaign found.

    Attributes:
        injections: Every injected fault, in order.
        skipped: By fault: how often it was not applicable, and the last reason.
        runs: Number of runs under faults.
        identical: Runs that ended bit-identical to the fault-free run (or within the tolerance).
        close: Runs that cannot be bit-identical, and whose losses were within HALVED_TOLERANCE of the fault-free run's.
        nondeterministic: Whether fault-free runs differ from each other, so that NONDETERMINISTIC_TOLERANCE applies.
        differences: What differed between last checkpoints.
        violations: Violations at the end of runs, which belong to no single fault.
        lost_steps: Number of recomputed steps.
        steps: Number of steps of the job.
        total_s: Seconds that the campaign took.
        close_means: How the runs that count as `close` ended, in words.
    """

    injections: list[Injection] = field(default_factory=list)
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    runs: int = 0
    identical: int = 0
    close: int = 0
    nondeterministic: bool = False
    differences: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    lost_steps: int = 0
    steps: int = 0
    total_s: float = 0.0
    close_means: str = f"with a halved micro-batch and losses within {HALVED_TOLERANCE:.0%}"

    @property
    def all_violations(self) -> list[str]:
        """Violations after single faults, then those at the end of runs."""
        of_faults = [
            f"run {injection.run}, {injection.fault} at step {injection.step}: {text}"
            for injection in self.injections
            for text in injection.violations
        ]
        return of_faults + self.violations

    @property
    def passed(self) -> bool:
        """Whether there is no violation and every run under faults ended like the fault-free one."""
        return not self.all_violations and self.identical + self.close == self.runs
