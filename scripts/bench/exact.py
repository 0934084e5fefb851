"""Virtual ranks against plain DDP: the same model, batches and number of ranks, a step of each in turn.

Both variants are in the same processes (gloo, one thread each), which alternate which of them is first. With as many
virtual ranks as ranks, each rank has one gradient, and the exchange takes the memory of less than a bucket, for what
other ranks send; with more, a rank keeps sums of its first ones, at most log2(V) + 1 sets of gradients.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import command_line, machine, make_parser, scratch_folder, spread, today, undisturbed, write_figures

PAGE = "exact.md"
SOURCE = """\
The method, and what is new in it: [virtual ranks](../design/architecture.md#virtual-ranks).
"""
WORKER = Path(__file__).with_name("exact_worker.py")


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
    """Start the ranks once; return what rank 0 has written."""
    output = scratch / f"{ranks}-{virtual_ranks}.json"
    order = {"virtual_ranks": virtual_ranks, "rounds": scale.rounds, "warm_up": 3, "output": str(output), "batch": 4}
    order |= {"width": scale.width, "layers": scale.layers, "length": scale.length}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*command, str(WORKER), json.dumps(order)], check=True, capture_output=True)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def ratio(found: dict[str, Any]) -> float:
    """Return the median of the ratios of steps that followed each other."""
    seconds = found["seconds"]
    pairs = zip(seconds["exact"], seconds["ddp"], strict=True)
    return float(statistics.median(ours / theirs for ours, theirs in pairs))


def main() -> None:
    """Measure, print a table, and write the page and the figures that were asked for."""
    parser = make_parser(__doc__, PAGE, quick="6 launches of 25 steps", smoke="a launch of 3 steps")
    options = parser.parse_args()
    scale = SMOKE if options.smoke else QUICK if options.quick else FULL
    figures: dict[str, float] = {}
    rows = ["| ranks | virtual ranks | step against DDP | sets of gradients | memory of the exchange, buckets |"]
    rows.append("|---|---|---|---|---|")
    with scratch_folder(Path("/tmp")) as scratch:
        launches: dict[tuple[int, int], list[dict[str, Any]]] = {case: [] for case in CASES}
        for number in range(scale.launches):
            for case in CASES:
                found = undisturbed(lambda case=case: measure(scratch, scale, *case), f"{case}", tries=2, say=print)  # type: ignore[misc]
                launches[case].append(found)
                print(f"launch {number + 1}, {case[0]} ranks, {case[1]} virtual: {ratio(found):.3f}", flush=True)
    for (ranks, virtual_ranks), all_found in launches.items():
        ratios = [ratio(one) for one in all_found]
        memory = max(one["exchange_bytes"] / one["bucket_bytes"] for one in all_found)
        sums = max(one["most_sums"] for one in all_found)
        rows.append(f"| {ranks} | {virtual_ranks} | {spread(ratios, 3)} | {sums} | {memory:.2f} |")
        if ranks == virtual_ranks:
            figures = {"step_time_vs_ddp": statistics.median(ratios), "step_time_vs_ddp_worst": max(ratios)}
            figures["exchange_buckets"] = memory
    table = "\n".join(rows)
    print(f"\n{machine()}\n\n{table}")
    write_figures(options.json, figures)
    if options.docs:
        parameters = launches[CASES[0]][0]["gradient_bytes"] / 1e6
        circumstances = (
            f"`{command_line('exact.py')}`, {today()}, on {machine()}; {scale.launches} launches of {scale.rounds} "
            f"steps of each variant; a transformer with {parameters:.0f} MB of gradients, in buckets of 25 MB."
        )
        method = " ".join((__doc__ or "").split())
        method += f"\n\n{SOURCE}"
        lines = "  \n".join(f"`{name}`: {value:.3f}" for name, value in figures.items())
        (options.docs / PAGE).write_text(
            f"# The same bits on any number of ranks\n\n{circumstances}\n\n{method}\n{table}\n\n{lines}\n"
        )


if __name__ == "__main__":
    main()
