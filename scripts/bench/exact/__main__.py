"""Virtual ranks against plain DDP: the same model, batches and number of ranks, a step of each in turn.

Both variants are in the same processes (gloo, one thread each), which alternate which of them is first. With as many
virtual ranks as ranks, each rank has one gradient, and the exchange takes the memory of less than a bucket, for what
other ranks send; with more, a rank keeps sums of its first ones, at most log2(V) + 1 sets of gradients.
"""

from __future__ import annotations

import functools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import Benchmark
from library.figures import figure_table, ratios, spread, table
from library.measuring import scratch_folder, undisturbed
from library.orders import order
from library.workers import TORCHRUN, results_of

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Scale:
    """How much is measured: launches of each case, steps of each, and the model's shape."""

    launches: int
    rounds: int
    width: int = 256
    layers: int = 6
    length: int = 64


FULL, QUICK, SMOKE = Scale(12, 40), Scale(6, 25), Scale(1, 3, width=32, layers=1, length=8)
# Ranks and virtual ranks: as many of both; blocks of two and of four; blocks of one and two.
CASES = ((2, 2), (2, 4), (2, 8), (2, 3))


def measure(scratch: Path, scale: Scale, ranks: int, virtual_ranks: int) -> dict[str, Any]:
    """Start the ranks once; return what rank 0 has measured."""
    model = {"width": scale.width, "layers": scale.layers, "length": scale.length}
    steps = order(WORKER, "steps", virtual_ranks=virtual_ranks, rounds=scale.rounds, **model)
    return results_of([*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *steps], scratch / "log")[0]


def ratio(found: dict[str, Any]) -> float:
    """Return the median of the ratios of steps that followed each other."""
    return statistics.median(ratios(found["seconds"]["exact"], found["seconds"]["ddp"]))


def main() -> None:
    bench = Benchmark("exact", __doc__, quick="6 launches of 25 steps", smoke="a launch of 3 steps")
    bench.parse()
    scale = bench.scale(FULL, QUICK, SMOKE)
    launches: dict[tuple[int, int], list[dict[str, Any]]] = {case: [] for case in CASES}
    with scratch_folder() as scratch:
        for number in range(scale.launches):
            for case in CASES:
                found = undisturbed(
                    functools.partial(measure, scratch, scale, *case), f"{case}", tries=2, say=bench.say
                )
                launches[case].append(found)
                bench.say(f"launch {number + 1}, {case[0]} ranks, {case[1]} virtual: {ratio(found):.3f}")
    figures: dict[str, float] = {}
    rows = []
    for (ranks, virtual_ranks), all_found in launches.items():
        steps = [ratio(one) for one in all_found]
        memory = max(one["exchange_bytes"] / one["bucket_bytes"] for one in all_found)
        sums = max(one["most_sums"] for one in all_found)
        rows.append([ranks, virtual_ranks, spread(steps, 3), sums, f"{memory:.2f}"])
        if ranks == virtual_ranks:
            figures = {"step_time_vs_ddp": statistics.median(steps), "step_time_vs_ddp_worst": max(steps)}
            figures["exchange_buckets"] = memory
    header = "ranks | virtual ranks | step against DDP | sets of gradients | memory of the exchange, buckets"
    bench.publish(
        "The same bits on any number of ranks",
        f"{scale.launches} launches of {scale.rounds} steps of each variant; a transformer with "
        f"{launches[CASES[0]][0]['gradient_bytes'] / 1e6:.0f} MB of gradients, in buckets of 25 MB.",
        figures,
        f"{table(header, rows)}\n\n{figure_table(figures)}",
    )


if __name__ == "__main__":
    main()
