"""What a failure costs: recovery from a killed rank, hangs, leftovers, preemption, and the overhead of supervision.

The bundled job (2 ranks, gloo, one thread each, no GPU) under `runner start`, and the same model, data and batches in a
plain `SFTTrainer` script under what others restart it with; all take turns within each round. `ft_launcher` (NVIDIA's
nvidia-resiliency-ext) runs without GPUs too, its health checks off; 0.4.1 is its newest wheel for Python 3.11 and glibc
before 2.39. It is installed into `.bench/` on first use, for the installed torch; where that fails, it is left out and
the reason is printed. `docs/benchmarks/recovery.md` has the latest result.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy
from library.benchmark import Benchmark
from library.figures import bar_table, ratios, spread, table
from library.measuring import scratch_folder
from recovery.kills import measure_kills, num_killed
from recovery.measures import measure_overhead, measure_recoveries
from recovery.trainings import FOR_INFORMATION, METHODS, RECOVERY_LIMIT_S, STOP_LIMIT_S, Trainings, find_ft_site

BARS = {
    "recovery_median_s": 3.0,
    "recovery_vs_loop": 1 / 6,
    "recovery_vs_torchrun": 0.3,
    "hangs": 0,
    "orphans": 0,
    "step_overhead": 1.005,
    "preempt_s": 2.0,  # The commit's time is added.
}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int  # Of recovery and preemption.
    kills: int  # At random moments.
    pairs: int  # Of blocks with and without supervision.
    tries: int = 1  # Repetitions of a disturbed recovery.
    methods: tuple[str, ...] = tuple(METHODS)  # What restarts the job.


QUICK = Scale(rounds=2, kills=10, pairs=150)
SMOKE = Scale(rounds=1, kills=1, pairs=2, methods=tuple(name for name in METHODS if name not in FOR_INFORMATION))


def median_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of the median."""
    draws = numpy.random.default_rng(seed).choice(numpy.asarray(values), size=(4000, len(values)))
    low, high = numpy.quantile(numpy.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def figures_of(trainings: Trainings) -> dict[str, float]:
    """Return the figures with a bar; a hang counts with the limit."""
    measured = trainings.measured
    ours = measured["recovery_s", "ours"]
    return {
        "recovery_median_s": statistics.median(ours),
        "recovery_vs_loop": statistics.median(ratios(ours, measured["recovery_s", "loop"])),
        "recovery_vs_torchrun": statistics.median(ratios(ours, measured["recovery_s", "torchrun"])),
        "hangs": len(trainings.hangs) + len(ours) - len(_back(ours)),
        "orphans": len(trainings.orphans),
        "step_overhead": 1 + sum(share for _, share in _overhead(trainings)),
        "preempt_s": statistics.median(measured["preempt_s", "ours"] or [STOP_LIMIT_S]),
    }


def _back(trials: Sequence[float]) -> list[float]:
    """Return the seconds of the trials that came back."""
    return [seconds for seconds in trials if seconds < RECOVERY_LIMIT_S]


def _overhead(trainings: Trainings) -> list[tuple[str, float]]:
    """Return the shares of a step that supervision takes, by what takes them."""
    return [(name, shares[0]) for (what, name), shares in trainings.measured.items() if what == "overhead"]


def table_of(trainings: Trainings, figures: Mapping[str, float], seed: int) -> str:
    """Return Markdown tables: each figure with its bar and the values behind it; then each method."""
    measured = trainings.measured
    pairs = ratios(measured["pairs", "supervised"], measured["pairs", "plain"])
    low, high = median_interval(pairs, seed)
    commit_s = statistics.median(measured["commit_s", "ours"] or [0.0])
    kills = ", ".join(f"{name} {number}" for name, number in sorted(trainings.kills.items()))
    behind = {
        "recovery_median_s": f"quartiles {spread(_back(measured['recovery_s', 'ours']))}",
        "recovery_vs_loop": "median of the rounds' ratios",
        "recovery_vs_torchrun": "median of the rounds' ratios",
        "hangs": f"{num_killed(trainings)} kills: {kills}",
        "orphans": "after every run of ours",
        "step_overhead": ", ".join(f"{name} {share:.2%}" for name, share in _overhead(trainings))
        + f" of {spread(measured['pairs', 'plain'], 3)} s; {len(pairs)} pairs with and without: 95 % interval "
        f"{low:.4f}…{high:.4f}",
        "preempt_s": f"{spread(measured['preempt_s', 'ours'])}; the commit {spread(measured['commit_s', 'ours'], 3)}",
    }
    bars = {name: ("≤", bar + (commit_s if name == "preempt_s" else 0)) for name, bar in BARS.items()}
    rows = []
    for method, title in METHODS.items():
        if trials := measured["recovery_s", method]:
            back = _back(trials)
            rows.append([title, spread(back), f"{len(trials) - len(back)} of {len(trials)}"])
    methods = table("restarted by | SIGKILL of a rank → next finished step, s | not back", rows)
    return f"{bar_table(figures, bars, behind)}\n\n{methods}"


def main() -> None:
    bench = Benchmark(
        "recovery",
        __doc__,
        quick="2 rounds, 10 kills, 150 pairs, nothing repeated",
        smoke="1 round, 1 kill, 2 pairs, without the methods for information",
    )
    bench.add_count("--rounds", 7, "of recovery and preemption")
    bench.add_count("--kills", 100, "at random moments")
    bench.add_count("--pairs", 300, "of blocks with and without supervision")
    bench.add_scratch()
    bench.add_seed("of moments, victims and orders")
    options = bench.parse()
    scale = bench.scale(Scale(options.rounds, options.kills, options.pairs, tries=2), QUICK, SMOKE)
    with scratch_folder(options.scratch) as scratch:
        ft_site = find_ft_site() if "ft" in scale.methods else None
        methods = [name for name in scale.methods if name != "ft" or ft_site is not None]
        trainings = Trainings(scratch, ft_site, bench.say)
        measure_recoveries(trainings, methods, scale.rounds, scale.tries, random.Random(options.seed))
        measure_overhead(trainings, scale.pairs, options.seed)
        measure_kills(trainings, scale.kills, random.Random(options.seed + 1))

    figures = figures_of(trainings)
    bench.publish(
        "Recovery: what a failure costs",
        f"{scale.rounds} rounds, {scale.kills} kills, {scale.pairs} pairs of blocks.",
        figures,
        table_of(trainings, figures, options.seed),
    )
    found = {"hang": trainings.hangs, "left over": trainings.orphans, "wrong": trainings.problems}
    for what, texts in found.items():
        for text in texts:
            print(f"{what}: {text}")
    sys.exit(1 if trainings.problems else 0)


if __name__ == "__main__":
    main()
