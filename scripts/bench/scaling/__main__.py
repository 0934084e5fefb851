"""Throughput by number of ranks: tokens per second of the bundled job on 1, 2, ... ranks, the same batch on each.

One thread per rank; the numbers of ranks take turns within each round. The first entries of a run do not count, because
DDP and the caches are not warm yet. Efficiency is the throughput of N ranks over N times that of one. The share of
communication is measured by DDP: the part of forward and backward in which a rank waits for others' gradients.
"""

from __future__ import annotations

import functools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import Benchmark
from library.figures import Samples, ratios, spread, table
from library.measuring import scratch_folder, undisturbed
from library.training_run import TrainingRun, start_command
from library.workers import WITHOUT_GPU

from checkpointing.agent.events import Log

SETTINGS = ("trainer.logging_steps=2", "trainer.save_strategy=no", "checkpoint.snapshot_steps=null")
NUM_COLD_ENTRIES = 4
LIMIT_S = 600.0


@dataclass(frozen=True)
class Scale:
    """How much is measured: rounds of all numbers of ranks, and steps of each run."""

    rounds: int
    steps: int = 120


QUICK, SMOKE = Scale(rounds=1, steps=40), Scale(rounds=1, steps=12)


def measure(folder: Path, ranks: int, steps: int) -> tuple[float, float]:
    """Run the job once; returns the median tokens per second of all ranks, and the share of communication."""
    settings = [f"trainer.max_steps={steps}", *SETTINGS]
    command = start_command(folder, "--nproc-per-node", str(ranks), settings=settings)
    with TrainingRun(command, folder, WITHOUT_GPU) as run:
        run.wait(lambda: None, LIMIT_S)
        if run.process.poll() != 0:
            sys.exit(f"the job on {ranks} ranks ended with exit code {run.process.poll()}:\n{run.tail(2000)}")
        logs = run.all(Log)[NUM_COLD_ENTRIES:]
    rates = [rate for log in logs if (rate := log.metric("tokens_per_s"))]
    shares = [log.metric("communication_share") or 0.0 for log in logs]
    return statistics.median(rates), statistics.median(shares)


def figures_of(numbers: list[int], measured: Samples) -> tuple[dict[str, float], str]:
    """Return the figures by name, and a Markdown table of them."""
    figures: dict[str, float] = {}
    rows = []
    for number in numbers:
        rates = measured["tokens_per_s", str(number)]
        rate, share = statistics.median(rates), statistics.median(measured["communication_share", str(number)])
        speed_ups = ratios(rates, measured["tokens_per_s", "1"])
        efficiency = statistics.median(speed_ups) / number
        figures[f"tokens_per_s_{number}"] = round(rate, 1)
        figures[f"scaling_efficiency_{number}"] = round(efficiency, 4)
        figures[f"communication_share_{number}"] = round(share, 4)
        cells = [spread(rates, 0), f"{rate / number:.0f}", spread(speed_ups), f"{efficiency:.0%}", f"{share:.1%}"]
        rows.append([number, *cells])
    header = "ranks | tokens/s | of each rank | speed-up | scaling efficiency | share of communication"
    return figures, table(header, rows)


def main() -> None:
    bench = Benchmark("scaling", __doc__, quick="1 round of 40 steps", smoke="1 round of 12 steps")
    bench.add_count("--rounds", 5)
    bench.add_count("--ranks", [1, 2], "1 is always measured", nargs="+")
    options = bench.parse()
    scale = bench.scale(Scale(options.rounds), QUICK, SMOKE)
    numbers = sorted({1, *options.ranks})
    measured = Samples(list)
    with scratch_folder() as scratch:
        for round_number in range(scale.rounds):
            for number in numbers:
                run = functools.partial(measure, scratch / f"{round_number}-{number}", number, scale.steps)
                rate, share = undisturbed(run, f"{number} ranks", tries=1, say=bench.say)
                measured["tokens_per_s", str(number)].append(rate)
                measured["communication_share", str(number)].append(share)
                bench.say(f"round {round_number + 1}/{scale.rounds}, {number} ranks: {rate:,.0f} tokens/s")
    figures, rows = figures_of(numbers, measured)
    circumstances = f"{scale.rounds} rounds of {scale.steps} steps."
    bench.publish("Scaling", circumstances, figures, rows)


if __name__ == "__main__":
    main()
