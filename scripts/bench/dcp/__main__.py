"""How long `async_save` of `torch.distributed.checkpoint` blocks training: stock, and with `checkpointing.dcp.protect`.

The same model and steps in turns, each in a process of its own. Blocked is the time of the call, and what the next
step of the optimizer waits for the copy. Durable is the time from the call to the end of the save: with `protect` the
files are synced, digested and published at once; stock torch syncs them, too.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.runs import CheckpointRuns
from library.benchmark import Benchmark
from library.figures import Samples, ratios, spread, table
from library.measuring import scratch_folder

STOCK, PROTECTED = "dcp-thread", "dcp-protected"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    steps: int = 21
    save_every: int = 5
    # 1.25 GB of weights and AdamW state.
    shape: dict[str, int] = field(default_factory=lambda: {"width": 768, "layers": 12, "tokens": 16})


QUICK = Scale(2, 11)
SMOKE = Scale(1, 5, 2, {"width": 64, "layers": 1, "tokens": 4})


def main() -> None:
    bench = Benchmark("dcp", __doc__, quick="2 rounds of 11 steps", smoke="a round of a tiny model")
    bench.add_count("--rounds", 4, "runs of each")
    options = bench.parse()
    scale = bench.scale(Scale(options.rounds), QUICK, SMOKE)
    measured = Samples(list)
    with scratch_folder() as folder:
        runs = CheckpointRuns(folder, shape=scale.shape, small_shape=scale.shape)
        for number in range(scale.rounds):
            for method in (STOCK, PROTECTED) if number % 2 == 0 else (PROTECTED, STOCK):
                run = runs.run(method, steps=scale.steps, save_every=scale.save_every)
                measured["bytes", "state"] = [run["state_bytes"]]
                # The first save of a run makes its memory.
                measured["blocked", method].append(statistics.median(run["blocked_s"][1:] or run["blocked_s"]))
                measured["durable", method].append(statistics.median(run["durable_s"]))
                measured["total", method].append(run["total_s"])
                bench.say(f"{method}: {run['total_s']:.2f} s, blocked {spread(run['blocked_s'], 4)}")
    rows = [("state", f"{measured['bytes', 'state'][0] / 1e9:.2f} GB", "", "", "")]
    figures = {}
    for what, bar in (("blocked", "0.1"), ("durable", ""), ("total", "")):
        ratio = ratios(measured[what, PROTECTED], measured[what, STOCK])
        figures[f"{what}_vs_stock"] = round(statistics.median(ratio), 5)
        stock_s, protected_s = (spread(measured[what, method], 4) for method in (STOCK, PROTECTED))
        rows.append((f"{what}, s", stock_s, protected_s, spread(ratio, 3), bar))
    bench.publish("DCP", "one process.", figures, table("figure | stock | protected | ratio | bar", rows))


if __name__ == "__main__":
    main()
