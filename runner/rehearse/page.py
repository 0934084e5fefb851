"""The page that a rehearsal ends with, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from runner.rehearse.disturbed_runs import MOMENTS, Costs, Findings, Rehearsed

# Share of the time that saving may take.
_OVERHEAD = 0.01
# Beyond what was measured, for a machine that is busy.
_GRACE_FACTOR, _GRACE_MIN_S = 3.0, 15.0


def advised_save_steps(costs: Costs) -> int | None:
    """Return after how many steps a commit costs a hundredth of the time; None where nothing was measured."""
    if not costs.step_s:
        return None
    price = (costs.snapshot_s or 0.0) + (costs.commit_cpu_s or 0.0)
    return max(math.ceil(price / (_OVERHEAD * costs.step_s)), 1)


def advised_grace_s(costs: Costs) -> int:
    """Return the seconds from a notice to the end that a step, a snapshot and its commit are given."""
    measured = (costs.step_s or 0.0) + (costs.snapshot_s or 0.0) + (costs.commit_s or 0.0)
    return math.ceil(max(_GRACE_FACTOR * measured, _GRACE_MIN_S))


def to_json(findings: Findings, steps: int) -> dict[str, Any]:
    """Return what `runner rehearse --json` prints."""
    return {
        "safe": findings.is_safe,
        "deterministic": not findings.by_itself,
        "steps": steps,
        "seconds": round(findings.seconds, 1),
        "runs": [asdict(outcome) for outcome in findings.outcomes],
        "differs_by_itself": findings.by_itself,
        "in_no_checkpoint": findings.uncovered,
        "hints": findings.hints,
        "costs": asdict(findings.costs),
        "save_steps": advised_save_steps(findings.costs),
        "grace_s": advised_grace_s(findings.costs),
    }


def render(findings: Findings, job: str, ranks: str, steps: int) -> str:
    """Return the page.

    Args:
        findings: What the rehearsal has found.
        job: What was rehearsed.
        ranks: On how many ranks.
        steps: Steps of each run.
    """
    lines = [f"{job}, {ranks}: {steps} steps, {len(findings.outcomes)} runs, {findings.seconds:.0f} s", ""]
    lines += [f"  {'run':<38}{'recovery':>9}  verdict"]
    lines += [_row(outcome) for outcome in findings.outcomes[1:]]
    lines += ["", *_verdict(findings)]
    costs = findings.costs
    if costs.step_s is not None:
        price = ", ".join(
            f"{what} {value * 1000:.0f} ms"
            for what, value in (("step", costs.step_s), ("snapshot", costs.snapshot_s), ("commit", costs.commit_s))
            if value is not None
        )
        lines += ["", f"  measured      {price} (medians; the first steps are slower than later ones)"]
        lines += [f"  save_steps    {advised_save_steps(costs)} or more: saving then takes at most 1 % of the time"]
        lines += [f"  grace         {advised_grace_s(costs)} s or more between a notice and the end (--grace)"]
    return "\n".join(lines)


def _row(outcome: Rehearsed) -> str:
    recovery = f"{outcome.recovery_s:.1f} s" if outcome.recovery_s is not None else "-"
    if not outcome.reached:
        why = next((moment.why_not for moment in MOMENTS if moment.name == outcome.name), "")
        return f"  {outcome.name:<38}{'-':>9}  not reached{f': {why}' if why else ''}"
    return f"  {outcome.name:<38}{recovery:>9}  {outcome.difference or 'the same bits'}"


def _verdict(findings: Findings) -> list[str]:
    uncovered = f"  in no checkpoint, and changed by training: {', '.join(findings.uncovered)}"
    if findings.is_safe:
        lines = ["SAFE: every run that was disturbed ended with the same bits as the undisturbed one"]
        lines += [uncovered, "  it made no difference in these steps"] if findings.uncovered else []
        return lines
    lines = ["NOT SAFE: a resumed run is another run"]
    if findings.by_itself:
        lines += [f"  two undisturbed runs differ, too ({findings.by_itself}): seed everything, and use deterministic"]
        lines += ["  algorithms; until then nothing can be proved"]
    lines += _unique([f"  {hint}" for hint in findings.hints])
    if findings.uncovered:
        lines += [uncovered]
        lines += ["  give it in states={...} as an object with state_dict and load_state_dict"]
    return lines


def _unique(lines: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(lines))
