"""Throughput by number of ranks: tokens per second of the bundled job on 1, 2, ... ranks, the same batch on each.

One thread per rank; the numbers of ranks take turns within each round. The first entries of a run do not count, because
DDP and the caches are not warm yet. Efficiency is the throughput of N ranks over N times that of one. The share of
communication is measured by DDP: the part of forward and backward in which a rank waits for others' gradients.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Progress, command_line, machine, make_parser, spread, today, undisturbed, write_figures
from training_run import TrainingRun

from checkpointing.agent.events import Log
from runner.chaos.run_under_test import runner_command
from runner.system import processes

# No GPU, and one thread for each rank.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
NUM_COLD_ENTRIES = 4
LIMIT_S = 600.0
PAGE = "scaling.md"


@dataclass(frozen=True)
class Scale:
    """How much is measured: rounds of all numbers of ranks, and steps of each run."""

    rounds: int
    steps: int


QUICK, SMOKE = Scale(rounds=1, steps=40), Scale(rounds=1, steps=12)


def measure(folder: Path, ranks: int, steps: int) -> tuple[float, float]:
    """Run the job once; returns the median tokens per second of all ranks, and the share of communication."""
    settings = [f"trainer.max_steps={steps}", "trainer.logging_steps=2", "trainer.save_strategy=no"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = runner_command(
        folder, "--nproc-per-node", str(ranks), *options, "--set", "checkpoint.snapshot_steps=null"
    )
    with TrainingRun(command, folder, ENVIRONMENT) as run:
        run.wait(lambda: None, LIMIT_S)
        if run.process.poll() != 0:
            sys.exit(f"the job on {ranks} ranks ended with exit code {run.process.poll()}:\n{run.tail(2000)}")
        logs = [entry.event for entry in run.find(Log) if isinstance(entry.event, Log)][NUM_COLD_ENTRIES:]
    rates = [rate for log in logs if (rate := log.metric("tokens_per_s"))]
    shares = [log.metric("communication_share") or 0.0 for log in logs]
    return statistics.median(rates), statistics.median(shares)


def figures_of(
    numbers: list[int], rates: dict[int, list[float]], shares: dict[int, list[float]]
) -> tuple[dict[str, float], str]:
    """Return the figures by name, and a Markdown table of them."""
    figures: dict[str, float] = {}
    lines = [
        "| ranks | tokens/s | of each rank | speed-up | scaling efficiency | share of communication |",
        "|---|---|---|---|---|---|",
    ]
    for number in numbers:
        ratios = [many / one for many, one in zip(rates[number], rates[1], strict=True)]
        speed_up, share = statistics.median(ratios), statistics.median(shares[number])
        figures[f"tokens_per_s_{number}"] = round(statistics.median(rates[number]), 1)
        figures[f"scaling_efficiency_{number}"] = round(speed_up / number, 4)
        figures[f"communication_share_{number}"] = round(share, 4)
        lines.append(
            f"| {number} | {spread(rates[number], 0)} | {statistics.median(rates[number]) / number:.0f} | "
            f"{spread(ratios)} | {speed_up / number:.0%} | {share:.1%} |"
        )
    return figures, "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, PAGE, quick="1 round of 40 steps", smoke="1 round of 12 steps")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="default: 1 2; 1 is always measured")
    options = parser.parse_args()
    scale = SMOKE if options.smoke else QUICK if options.quick else Scale(options.rounds, steps=120)
    numbers = sorted({1, *options.ranks})
    if scale.rounds < 1 or numbers[0] < 1:
        parser.error("--rounds and --ranks must be at least 1")
    processes.become_subreaper()
    rates: dict[int, list[float]] = {number: [] for number in numbers}
    shares: dict[int, list[float]] = {number: [] for number in numbers}
    say = Progress()
    scratch = Path(tempfile.mkdtemp(prefix="sb-"))
    try:
        for round_number in range(scale.rounds):
            for number in numbers:
                run = functools.partial(measure, scratch / f"{round_number}-{number}", number, scale.steps)
                rate, share = undisturbed(run, f"{number} ranks", tries=1, say=say)
                rates[number].append(rate)
                shares[number].append(share)
                say(f"round {round_number + 1}/{scale.rounds}, {number} ranks: {rate:,.0f} tokens/s")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    figures, table = figures_of(numbers, rates, shares)
    print(f"\n{machine()}; {scale.rounds} rounds of {scale.steps} steps\n\n{table}")
    write_figures(options.json, figures)
    if options.docs:
        circumstances = (
            f"`{command_line('scaling.py')}`, {today()}, on {machine()}; {scale.rounds} rounds of {scale.steps} steps."
        )
        method = " ".join((__doc__ or "").split())
        (options.docs / PAGE).write_text(f"# Scaling\n\n{circumstances}\n\n{table}\n\n{method}\n")


if __name__ == "__main__":
    main()
