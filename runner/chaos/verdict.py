"""A campaign's result as a table and as JSON."""

from __future__ import annotations

import statistics
from typing import Any

from runner.chaos.result import NONDETERMINISTIC_TOLERANCE, Result


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
