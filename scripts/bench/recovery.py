"""What a failure costs: recovery from a killed rank, hangs, leftovers, preemption, and the overhead of supervision.

The bundled job (2 ranks, gloo, one thread each, no GPU) under `runner start`, and the same model, data and batches in a
plain `SFTTrainer` script under what others restart it with; all take turns within each round. `ft_launcher` (NVIDIA's
nvidia-resiliency-ext) runs without GPUs too, its health checks off; 0.4.1 is its newest wheel for Python 3.11 and glibc
before 2.39. It is installed into `.bench/` on first use, for the installed torch; where that fails, it is left out and
the reason is printed. `docs/benchmarks/recovery.md` has the latest result.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import Progress, command_line, end_by_signals, machine, make_parser, today, write_figures
from recovery_figures import METHOD, Measured, figures_of, table_of
from recovery_kills import KillRuns
from recovery_measures import Recoveries, measure_overhead
from recovery_trainings import FOR_INFORMATION, METHODS, Findings, Trainings, find_ft_site

PAGE = "recovery.md"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Of recovery and preemption.
        kills: At random moments.
        pairs: Of blocks with and without supervision.
        tries: Repetitions of a disturbed recovery.
        methods: What restarts the job.
    """

    rounds: int
    kills: int
    pairs: int
    tries: int = 1
    methods: tuple[str, ...] = tuple(METHODS)


QUICK = Scale(rounds=2, kills=10, pairs=150)
SMOKE = Scale(rounds=1, kills=1, pairs=2, methods=tuple(name for name in METHODS if name not in FOR_INFORMATION))


def main() -> None:
    parser = make_parser(
        __doc__,
        PAGE,
        quick="2 rounds, 10 kills, 150 pairs, nothing repeated",
        smoke="1 round, 1 kill, 2 pairs, without the methods for information",
    )
    parser.add_argument("--rounds", type=int, default=7, help="of recovery and preemption; default: 7")
    parser.add_argument("--kills", type=int, default=100, help="at random moments; default: 100")
    parser.add_argument("--pairs", type=int, default=300, help="of blocks with and without supervision; default: 300")
    parser.add_argument("--scratch", type=Path, help="folder for the runs; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="of moments, victims and orders; default: 0")
    options = parser.parse_args()
    full = Scale(options.rounds, options.kills, options.pairs, tries=2)
    scale = SMOKE if options.smoke else QUICK if options.quick else full
    if min(scale.rounds, scale.kills, scale.pairs) < 1:
        parser.error("--rounds, --kills and --pairs must be at least 1")

    end_by_signals()
    scratch = Path(tempfile.mkdtemp(prefix="rb-", dir=options.scratch))
    say, measured = Progress(sys.stderr), Measured()
    findings = Findings(say)
    try:
        ft_site = find_ft_site() if "ft" in scale.methods else None
        methods = [name for name in scale.methods if name != "ft" or ft_site is not None]
        trainings = Trainings(scratch, ft_site)
        Recoveries(trainings, measured, findings, options.seed, say).measure(methods, scale.rounds, tries=scale.tries)
        measure_overhead(trainings, measured, findings, scale.pairs, options.seed, say)
        KillRuns(trainings, measured, findings, options.seed + 1, say).measure(scale.kills)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    figures = figures_of(measured, findings)
    table = table_of(measured, figures, options.seed)
    print(f"\n{table}")
    for what, texts in {"hang": findings.hangs, "left over": findings.orphans, "wrong": findings.problems}.items():
        for text in texts:
            print(f"{what}: {text}")
    write_figures(options.json, figures)
    if options.docs:
        text = (
            "# Recovery: what a failure costs\n\n"
            f"`{command_line('recovery.py')}`, {today()}, on {machine()}; {scale.rounds} rounds, "
            f"{scale.kills} kills, {scale.pairs} pairs of blocks.\n\n{table}\n\n{METHOD}"
        )
        (options.docs / PAGE).write_text(text)
    if findings.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
