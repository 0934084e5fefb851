"""A campaign's result as a table and as JSON."""

from __future__ import annotations

import statistics
from typing import Any

from runner.chaos.result import HALVED_TOLERANCE, UNSTEADY_TOLERANCE, Result


def rows(result: Result) -> list[dict[str, Any]]:
    """One per kind of fault that was struck, or could not be."""
    found = []
    for fault in dict.fromkeys([*(strike.fault for strike in result.strikes), *result.skipped]):
        strikes = [strike for strike in result.strikes if strike.fault == fault]
        times = [strike.recovered_s for strike in strikes if strike.recovered_s is not None]
        number, why = result.skipped.get(fault, (0, ""))
        found.append(
            {
                "fault": fault,
                "struck": len(strikes),
                "recovered_s": round(statistics.median(times), 2) if times else None,
                "violations": sum(len(strike.violations) for strike in strikes),
                "skipped": number,
                "why_skipped": why,
            }
        )
    return sorted(found, key=lambda row: (-row["struck"], row["fault"]))


def to_json(result: Result, seed: int) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "faults": len(result.strikes),
        "violations": len(result.all_violations),
        # Of all that could be: a halved micro-batch adds up in another order.
        "identical": result.identical + result.close == result.runs and not result.unsteady,
        "lost_steps": result.lost_steps,
        "runs": result.runs,
        # The job ends in other bits each time, also in peace.
        "unsteady": result.unsteady,
        "runs_identical": result.identical,
        "runs_halved_within_tolerance": result.close,
        "steps": result.steps,
        "seconds": round(result.total_s, 1),
        "seed": seed,
        "violation_texts": result.all_violations,
        "differences": result.differences,
        "rows": rows(result),
        "strikes": [vars(strike) for strike in result.strikes],
    }


def render(result: Result, seed: int) -> str:
    """The table, and the verdict as its last line."""
    lines = [f"{'fault':<30} {'struck':>6} {'back after':>11} {'violations':>11}"]
    for row in rows(result):
        back = f"{row['recovered_s']:.2f} s" if row["recovered_s"] is not None else "-"
        note = f"   {row['skipped']} times it could not strike: {row['why_skipped']}" if row["skipped"] else ""
        lines.append(f"{row['fault']:<30} {row['struck']:>6} {back:>11} {row['violations']:>11}{note}")
    lines += [f"VIOLATION: {text}" for text in result.all_violations]
    lines += [f"DIFFERENT: {text}" for text in result.differences]
    same = f"within {UNSTEADY_TOLERANCE:g} of the same numbers" if result.unsteady else "in the same bits"
    close = (
        f"{result.close} with a halved micro-batch in its losses within {HALVED_TOLERANCE:.0%}, "
        if result.close
        else ""
    )
    lines.append(
        f"{len(result.strikes)} faults in {result.runs} runs of {result.steps} steps (seed {seed}, "
        f"{result.total_s:.0f} s): {len(result.all_violations)} violations, {result.identical} of {result.runs} runs "
        f"ended {same} as the run in peace, {close}{result.lost_steps} steps were computed again"
    )
    return "\n".join(lines)
