"""What a campaign injected and found, and its verdict as a table and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

# Halving the micro-batch changes the order of sums and the dropout masks, so losses may differ by this share. Only
# every few runs get faults that halve it, so that all others are compared bit for bit.
HALVED_TOLERANCE = 0.02
# For a job that is not bit-identical without faults either, because its kernels add in any order.
NONDETERMINISTIC_TOLERANCE = 1e-3


@dataclass
class Injection:
    """One injected fault and its consequences."""

    fault: str
    moment: str  # When it was injected, as a value of `Moment`.
    run: int  # Number of the run, from 1.
    step: int  # Last step that the journal knew at that time.
    what: str  # What was done, in words.
    # Seconds until the run made progress again; None if the fault ends nothing, or it never did.
    recovered_s: float | None = None
    violations: list[str] = field(default_factory=list)  # Invariants that did not hold afterwards, in words.


@dataclass
class Result:
    """Everything that a campaign found."""

    injections: list[Injection] = field(default_factory=list)
    # By fault: how often it was not applicable, and the last reason.
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    runs: int = 0  # Number of runs under faults.
    identical: int = 0  # Runs that ended bit-identical to the fault-free run (or within the tolerance).
    # Runs that cannot be bit-identical, and whose losses were within HALVED_TOLERANCE of the fault-free run's.
    close: int = 0
    # Whether fault-free runs differ from each other, so that NONDETERMINISTIC_TOLERANCE applies.
    nondeterministic: bool = False
    differences: list[str] = field(default_factory=list)  # What differed between last checkpoints.
    # Violations at the end of runs, which belong to no single fault.
    violations: list[str] = field(default_factory=list)
    lost_steps: int = 0  # Number of recomputed steps.
    steps: int = 0  # Number of steps of the job.
    total_s: float = 0.0
    # How the runs that count as `close` ended, in words.
    close_means: str = f"with a halved micro-batch and losses within {HALVED_TOLERANCE:.0%}"

    def skip(self, fault: str, why: str) -> None:
        """Record that a fault was not applicable."""
        self.skipped[fault] = (self.num_skipped(fault) + 1, why)

    def num_skipped(self, fault: str) -> int:
        """Return how often a fault was not applicable."""
        return self.skipped.get(fault, (0, ""))[0]

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


def rows(result: Result) -> list[dict[str, Any]]:
    """Return one row per kind of fault that was injected or skipped, the most frequent first."""
    found = []
    for fault in dict.fromkeys([*(injection.fault for injection in result.injections), *result.skipped]):
        injections = [injection for injection in result.injections if injection.fault == fault]
        times = [injection.recovered_s for injection in injections if injection.recovered_s is not None]
        number, why = result.skipped.get(fault, (0, ""))
        found.append(
            {
                "fault": fault,
                "injected": len(injections),
                "recovered_s": round(statistics.median(times), 2) if times else None,
                "violations": sum(len(injection.violations) for injection in injections),
                "skipped": number,
                "why_skipped": why,
            }
        )
    return sorted(found, key=lambda row: (-row["injected"], row["fault"]))


def to_json(result: Result, seed: int) -> dict[str, Any]:
    """Return what `runner chaos --json` writes."""
    return {
        "faults": len(result.injections),
        "violations": len(result.all_violations),
        # A run with a halved micro-batch cannot be bit-identical, so it does not count against this.
        "identical": result.identical + result.close == result.runs and not result.nondeterministic,
        "lost_steps": result.lost_steps,
        "runs": result.runs,
        "nondeterministic": result.nondeterministic,
        "runs_identical": result.identical,
        "runs_halved_within_tolerance": result.close,
        "steps": result.steps,
        "seconds": round(result.total_s, 1),
        "seed": seed,
        "violation_texts": result.all_violations,
        "differences": result.differences,
        "rows": rows(result),
        "injections": [vars(injection) for injection in result.injections],
    }


def render(result: Result, seed: int) -> str:
    """Return the table, with the verdict as its last line."""
    lines = [f"{'fault':<30} {'injected':>8} {'recovery':>9} {'violations':>11}"]
    for row in rows(result):
        recovery = f"{row['recovered_s']:.2f} s" if row["recovered_s"] is not None else "-"
        note = f"   {row['skipped']} times not applicable: {row['why_skipped']}" if row["skipped"] else ""
        lines.append(f"{row['fault']:<30} {row['injected']:>8} {recovery:>9} {row['violations']:>11}{note}")
    lines += [f"VIOLATION: {text}" for text in result.all_violations]
    lines += [f"DIFFERENT: {text}" for text in result.differences]
    same = "bit-identical to"
    if result.nondeterministic:
        same = f"within {NONDETERMINISTIC_TOLERANCE:g} of"
    close = f"{result.close} {result.close_means}, " if result.close else ""
    lines.append(
        f"{len(result.injections)} faults in {result.runs} runs of {result.steps} steps (seed {seed}, "
        f"{result.total_s:.0f} s): {len(result.all_violations)} violations, {result.identical} of {result.runs} runs "
        f"{same} the fault-free run, {close}{result.lost_steps} steps recomputed"
    )
    return "\n".join(lines)
