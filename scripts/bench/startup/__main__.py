"""From the command to the end of the first step: `runner start -m PROGRAM` against `torchrun -m PROGRAM`.

The same programs in turns, on the same ranks, with warm caches: a Trainer of transformers, and a bare loop. Neither
names this library. The runner loads libraries once and forks its ranks; torchrun's ranks load them each by itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import Benchmark
from library.figures import Samples, ratios, spread, table
from library.measuring import scratch_folder

PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
TORCHRUN, RUNNER = "torchrun", "runner"
BAR = 1.05


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    programs: tuple[str, ...] = ("trainer_job", "loop_job")


QUICK = Scale(3)
SMOKE = Scale(1, ("loop_job",))


def command(method: str, program: str, ranks: int, folder: Path) -> list[str]:
    """Return the command that a user would type."""
    own = ["--nproc-per-node", str(ranks), "-m", program]
    if method == TORCHRUN:
        return [str(BIN / "torchrun"), "--standalone", *own]
    return [str(BIN / "runner"), "start", "--output-dir", str(folder / "run"), *own]


def first_step_s(method: str, program: str, ranks: int, scratch: Path) -> float:
    """Run a program to its end; return the seconds from the command to the end of its first step."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAMS), "FIRST_STEP": str(folder / "at")}
    with (folder / "log").open("wb") as log:
        began = time.time()
        done = subprocess.run(
            command(method, program, ranks, folder), cwd=folder, env=environment, stdout=log, stderr=log, timeout=600
        )
    if done.returncode != 0:
        sys.exit(f"startup: {method} {program} ended with {done.returncode}:\n{(folder / 'log').read_text()[-2000:]}")
    return float((folder / "at").read_text()) - began


def main() -> None:
    bench = Benchmark("startup", __doc__, quick="3 rounds", smoke="a round of the loop")
    bench.add_count("--rounds", 5, "starts of each")
    bench.add_count("--ranks", 2, "ranks")
    options = bench.parse()
    scale = bench.scale(Scale(options.rounds), QUICK, SMOKE)
    measured = Samples(list)
    with scratch_folder() as scratch:
        for number in range(scale.rounds + 1):
            for program in scale.programs:
                for method in (TORCHRUN, RUNNER) if number % 2 == 0 else (RUNNER, TORCHRUN):
                    seconds = first_step_s(method, program, options.ranks, scratch)
                    bench.say(f"{program}, {method}: {seconds:.2f} s{'' if number else ' (warms the caches)'}")
                    if number:
                        measured[program, method].append(seconds)
    rows, figures = [], {}
    for program in scale.programs:
        ratio = ratios(measured[program, RUNNER], measured[program, TORCHRUN])
        figures[f"{program}_vs_torchrun"] = round(statistics.median(ratio), 4)
        theirs, ours = (spread(measured[program, method], 2) for method in (TORCHRUN, RUNNER))
        rows.append((program, theirs, ours, spread(ratio, 3), f"{BAR:g}"))
    head = "program | torchrun, s | runner, s | ratio | bar"
    bench.publish("Start-up", f"{options.ranks} ranks.", figures, table(head, rows))


if __name__ == "__main__":
    main()
