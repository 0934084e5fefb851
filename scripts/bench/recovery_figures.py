"""Figures, tables and method of `recovery.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from common import spread
from recovery_trainings import FT_PACKAGES, METHODS, RECOVERY_LIMIT_S, STOP_LIMIT_S, Findings

from runner.chaos.run_under_test import SETTLE_S

BARS = {
    "recovery_median_s": 3.0,
    "recovery_vs_loop": 1 / 6,
    "recovery_vs_torchrun": 0.3,
    "hangs": 0,
    "orphans": 0,
    "step_overhead": 1.005,
    "preempt_s": 2.0,  # The commit's time is added.
}


@dataclass
class Measured:
    """All that was measured, in seconds.

    Attributes:
        recovery_s: By method; None for a training that hung.
        preempt_s: From SIGTERM to the exit.
        commit_s: Of the commits of preempted runs.
        kills: Their number by moment and by victim.
        num_kills: Their number.
        pairs: Of a step with supervision and without.
        overhead: Shares of a step, by what takes them.
    """

    recovery_s: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in METHODS})
    preempt_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    num_kills: int = 0
    pairs: list[tuple[float, float]] = field(default_factory=list)
    overhead: dict[str, float] = field(default_factory=dict)

    def count_kill(self, moment: str, victim: str) -> None:
        self.num_kills += 1
        for key in (moment, victim):
            self.kills[key] = self.kills.get(key, 0) + 1


def median_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of the median."""
    draws = numpy.random.default_rng(seed).choice(numpy.asarray(values), size=(4000, len(values)))
    low, high = numpy.quantile(numpy.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def _ratio(measured: Measured, peer: str) -> float:
    """Return the median over the rounds of ours / the peer's; a hang counts with the limit."""
    ours, theirs = ([RECOVERY_LIMIT_S if s is None else s for s in measured.recovery_s[n]] for n in ("ours", peer))
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def figures_of(measured: Measured, findings: Findings) -> dict[str, float]:
    """Return the figures with a bar."""
    num_hung = sum(seconds is None for seconds in measured.recovery_s["ours"])
    return {
        "recovery_median_s": statistics.median(
            RECOVERY_LIMIT_S if seconds is None else seconds for seconds in measured.recovery_s["ours"]
        ),
        "recovery_vs_loop": _ratio(measured, "loop"),
        "recovery_vs_torchrun": _ratio(measured, "torchrun"),
        "hangs": len(findings.hangs) + num_hung,
        "orphans": len(findings.orphans),
        "step_overhead": 1 + sum(measured.overhead.values()),
        "preempt_s": statistics.median(measured.preempt_s or [STOP_LIMIT_S]),
    }


def table_of(measured: Measured, figures: Mapping[str, float], seed: int) -> str:
    """Return Markdown tables: each figure with its bar and the values behind it; then each method."""
    ratios = [supervised / plain for supervised, plain in measured.pairs]
    low, high = median_interval(ratios, seed)
    commit_s = statistics.median(measured.commit_s or [0.0])
    kills = ", ".join(f"{name} {number}" for name, number in sorted(measured.kills.items()))
    behind = {
        "recovery_median_s": f"quartiles {spread([s for s in measured.recovery_s['ours'] if s is not None])}",
        "recovery_vs_loop": "median of the rounds' ratios",
        "recovery_vs_torchrun": "median of the rounds' ratios",
        "hangs": f"{measured.num_kills} kills: {kills}",
        "orphans": "after every run of ours",
        "step_overhead": ", ".join(f"{name} {share:.2%}" for name, share in measured.overhead.items())
        + f" of {spread([plain for _, plain in measured.pairs], 3)} s; {len(ratios)} pairs with and without: 95 % "
        f"interval {low:.4f}…{high:.4f}",
        "preempt_s": f"{spread(measured.preempt_s)}; the commit {spread(measured.commit_s, 3)}",
    }
    bars = {**BARS, "preempt_s": BARS["preempt_s"] + commit_s}
    lines = ["| figure | measured | bar | | behind it: median (quartiles) |", "|---|---|---|---|---|"]
    for name, value in figures.items():
        verdict = "PASS" if value <= bars[name] else "MISS"
        lines.append(f"| `{name}` | {value:.4g} | ≤ {bars[name]:.4g} | {verdict} | {behind[name]} |")
    lines += ["", "| restarted by | SIGKILL of a rank → next finished step, s | not back |", "|---|---|---|"]
    for method, title in METHODS.items():
        trials = measured.recovery_s[method]
        back = [seconds for seconds in trials if seconds is not None]
        if trials:
            lines.append(f"| {title} | {spread(back)} | {len(trials) - len(back)} of {len(trials)} |")
    return "\n".join(lines)


METHOD = f"""\
**Recovery**: the bundled job, 2 ranks on gloo, one thread each, in a new folder each time. In the middle of training
(step 25 to 36, between two saves; the same step and rank for all methods of a round) a rank gets SIGKILL. The time
runs until the first finished step of the next process group. The runner's journal records each step
(`trainer.logging_steps=1`); the peers' script records it at the same place in the Trainer's loop. The peers train the
same model on the same data with the same options, by a plain `SFTTrainer` script that resumes from
`get_last_checkpoint`; it keeps its tokenised data, as the runner does. The loop is `until torchrun …; do :; done`,
without a pause; the runner makes its default pause. A method that has not come back after {RECOVERY_LIMIT_S:.0f} s
counts as hanging, with that time. `torchrun --max-restarts` in its default configuration and `ft_launcher`
({FT_PACKAGES[0]}) take part in every third round, for information. If more than a tenth of the processor time went to
other virtual machines, a recovery is repeated, once at most.

**Kills**: runs with default settings, except for `restart.max_restarts`. SIGKILL to rank 0, rank 1, the launcher or
the agent, at random: during imports, between two attempts, during a restore, between two saves, around a save. After
each, the next attempt must reach the moment of the next kill, and the last one a finished step, within
{RECOVERY_LIMIT_S:.0f} s plus the pause that the journal records. Then the run is stopped by SIGTERM. A process that
is alive {SETTLE_S:.0f} s after a run's end is an orphan. Orphans are found by a mark in their environment, by the
run's id, and by descent (the benchmark is a subreaper).

**Overhead**: the bundled job's training in one run, in alternating blocks of 5 steps on the same batches, without the
first step of each block. In one block of each pair, in random order, heartbeats, flag exchange and reports are left
out. Steps of one job differ by a tenth for reasons of the machine, so the pairs' ratios say no more than the interval
given. The figure is the sum of all that supervision does, each part measured and counted as if nothing else ran
meanwhile: the time that the callbacks take of a step, in the slowest rank and including what interrupts them; the
processor time of the flag exchange's own threads; and the processor time of all other processes of the run
(supervisor, agent, launcher), as a share of the ranks' cores. Snapshots and commits are off:
`docs/benchmarks/checkpoint.md` has their cost.

**Preemption**: in the same runs as the recovery, some steps after it. From SIGTERM to `runner start` until it has
ended, with exit code 75 and the last finished step committed, all digests compared.
"""
