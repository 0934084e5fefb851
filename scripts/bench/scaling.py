"""Throughput by number of ranks: tokens per second of the bundled job on 1, 2, ... ranks, the same batch on each.

One thread per rank; the numbers of ranks take turns within each round. The first entries of a run do not count, because
DDP and the caches are not warm yet. Efficiency is the throughput of N ranks over N times that of one. The share of
communication is measured by DDP: the part of forward and backward in which a rank waits for others' gradients.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, machine, spread, undisturbed

from checkpointing.events import Log
from runner.chaos.run_under_test import RunUnderTest, runner_command
from runner.system import processes

# No GPU is used, and each rank has one thread.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
NUM_COLD_ENTRIES = 4
LIMIT_S = 600.0
DOCS = ROOT / "docs" / "benchmarks" / "scaling.md"


def measure(folder: Path, ranks: int, steps: int) -> tuple[float, float]:
    """Median tokens per second of all ranks, and the share of communication."""
    settings = [f"trainer.max_steps={steps}", "trainer.logging_steps=2", "trainer.save_strategy=no"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = runner_command(
        folder, "--nproc-per-node", str(ranks), *options, "--set", "checkpoint.snapshot_steps=null"
    )
    with RunUnderTest(command, folder, ENVIRONMENT) as run:
        run.wait(lambda: None, LIMIT_S)
        if run.process.poll() != 0:
            sys.exit(f"the job on {ranks} ranks ended with {run.process.poll()}:\n{run.tail(2000)}")
        run.refresh()
        entries = [event.metrics for event in run.all(Log)[NUM_COLD_ENTRIES:]]
    rates = [entry["tokens_per_s"] for entry in entries if entry.get("tokens_per_s")]
    shares = [entry.get("communication_share", 0.0) for entry in entries]
    return statistics.median(rates), statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 round of 40 steps")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="default: 1 2; 1 is always measured")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    rounds, steps = (1, 40) if options.quick else (options.rounds, 120)
    numbers = sorted({1, *options.ranks})
    if rounds < 1 or numbers[0] < 1:
        parser.error("--rounds and --ranks must be at least 1")
    processes.become_subreaper()
    rates: dict[int, list[float]] = {number: [] for number in numbers}
    shares: dict[int, list[float]] = {number: [] for number in numbers}
    scratch = Path(tempfile.mkdtemp(prefix="sb-"))
    try:
        for round_number in range(rounds):
            for number in numbers:
                folder = scratch / f"{round_number}-{number}"
                rate, share = undisturbed(
                    lambda folder=folder, number=number: measure(folder, number, steps),  # type: ignore[misc]
                    f"{number} ranks",
                    tries=1,
                    say=print,
                )
                rates[number].append(rate)
                shares[number].append(share)
                print(f"round {round_number + 1}: {number} ranks: {rate:,.0f} tokens/s", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

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
    print("\n".join(["", f"{machine()}; {rounds} rounds of {steps} steps", "", *lines]))
    if options.docs:
        command = " ".join(["python scripts/bench/scaling.py", *sys.argv[1:]])
        command_line = f"`{command}`, {time.strftime('%Y-%m-%d')}, on {machine()}; {rounds} rounds of {steps} steps."
        text = " ".join((__doc__ or "").split())
        DOCS.write_text("\n".join(["# Scaling", "", command_line, "", *lines, "", text]) + "\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
