"""What checkpoints cost training: ours against the peers, on the same model and steps, in turns.

Every variant runs in a process of its own, in rounds of changing order; the results are medians over all rounds and
ratios of them. `docs/benchmarks/checkpoint.md` has the latest result. The driver itself does not need torch.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpoint_figures import MODES, PEERS, Measured, figures_of, plot, resume_figures, table_of
from checkpoint_runs import DLROVER_VENV, CheckpointRuns
from common import command_line, machine, make_parser, make_venv, pair_count, spread, today, undisturbed, write_figures

DLROVER_PACKAGES = ["dlrover==0.6.1", "grpcio==1.85.1", "protobuf==7.36.2", "torch==2.13.0", "numpy"]
PAGE = "checkpoint.md"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Of all variants.
        steps: Of a run.
        peers: Variants other than this project's and no checkpointing.
        tries: Repetitions of a disturbed run.
        slow_steps: Of a run on a slow disk.
        save_every: Steps between saves.
        shape: 1.25 GB of weights and AdamW state; a step takes about a second on one core.
        small_shape: For the slow disk.
    """

    rounds: int
    steps: int
    peers: list[str]
    tries: int
    slow_steps: int
    save_every: int = 5
    shape: dict[str, int] = field(default_factory=lambda: {"width": 768, "layers": 12, "tokens": 16})
    small_shape: dict[str, int] = field(default_factory=lambda: {"width": 256, "layers": 8, "tokens": 320})


TINY_SHAPE = {"width": 64, "layers": 1, "tokens": 4}
# With the shared stager DCP's process is always quicker.
QUICK = Scale(1, 11, [name for name in PEERS if name != "dcp-process"], tries=1, slow_steps=40)
# One peer that blocks, and the one with the most parts. DLRover needs an environment of its own.
SMOKE = Scale(
    1,
    5,
    ["hf", "dcp-shm-async"],
    tries=1,
    slow_steps=5,
    save_every=2,
    shape=TINY_SHAPE,
    small_shape=TINY_SHAPE,
)


def measure_round(runs: CheckpointRuns, measured: Measured, scale: Scale, name: str) -> None:
    """Measure every variant in both modes, then the disk, the resumes and the slow disk."""
    num_saves = (scale.steps - 1) // scale.save_every
    for mode, title in MODES.items():
        plain_s = 0.0
        methods = [*scale.peers, "ours"]
        for method in ["none", *random.sample(sorted(methods), len(methods))]:
            run = undisturbed(
                functools.partial(runs.run, method, steps=scale.steps, core=0 if mode == "pinned" else None),
                method,
                tries=scale.tries,
                say=runs.say,
            )
            measured.state_bytes = run["state_bytes"]
            series = measured.series[mode][method]
            plain_s = run["total_s"] if method == "none" else plain_s
            series.peak_bytes.append(run["peak_bytes"])
            if method != "none":
                series.blocked_s += run["blocked_s"]
                series.durable_s += run["durable_s"]
                series.overhead_s.append((run["total_s"] - plain_s) / num_saves)
            runs.say(
                f"{name}, {title}, {method}: {run['total_s']:.2f} s, "
                f"blocked {spread(run['blocked_s'], 4)}, durable {spread(run['durable_s'])}"
            )
    for _ in range(2):
        measured.dd_s["fdatasync"].append(runs.dd(measured.state_bytes, "conv=fdatasync"))
        measured.dd_s["direct"].append(runs.dd(measured.state_bytes, "oflag=direct"))
    runs.say(f"dd: {measured.dd_s}")
    measure_resume(runs, measured)
    pair = runs.slow_disk_pair(steps=scale.slow_steps)
    if pair is None:
        runs.say("slow disk: left out, writes cannot be throttled here (no blkio cgroup)")
    else:
        measured.slow.append(pair)
        runs.say(f"slow disk: median step {pair[0]:.3f} s, without saves {pair[1]:.3f} s")


def measure_resume(runs: CheckpointRuns, measured: Measured) -> None:
    memory_s, disk_s = runs.resume_pair()
    measured.resumes.append((memory_s, disk_s))
    runs.say(f"resume from memory {memory_s:.2f} s, from disk {disk_s:.2f} s: {disk_s / memory_s:.2f}")


def page_of(measured: Measured, scale: Scale, table: str, rows: list[str]) -> str:
    figures = "\n".join(["| figure | value |", "|---|---|", *rows])
    return (
        "# Checkpoints: what a save costs training\n\n"
        f"`{command_line('checkpoint.py')}`, {today()}, on {machine()}; 1 rank, 1 thread, "
        f" {measured.state_bytes / 1e9:.2f} GB of state, a save every {scale.save_every} steps of about 1 s, "
        f"{scale.rounds} rounds of {scale.steps} steps. Per save: median (quartiles). Overhead is (total time - total "
        'time of "none" in the same round) / saves. Hugging Face does not call fsync: its "durable" is not. A run '
        "during which other virtual machines took more than a tenth of the processor time is repeated, twice at "
        f"most.\n\n![blocked time and overhead](checkpoint.svg)\n\n{table}\n\n"
        f"`dd` of the same bytes: {spread(measured.dd_s['fdatasync'])} s with `conv=fdatasync`, "
        f"{spread(measured.dd_s['direct'])} s with `oflag=direct`. Resume from memory "
        f"{spread([memory for memory, _ in measured.resumes])} s, from the disk with its cache dropped "
        f"{spread([disk for _, disk in measured.resumes])} s.\n\n{figures}\n"
    )


def main() -> None:
    parser = make_parser(
        __doc__,
        PAGE,
        quick="one round of short runs, without DCP's plain process",
        smoke="a tiny model, two peers",
    )
    parser.add_argument("--rounds", type=int, default=4, help="default: 4")
    parser.add_argument("--steps", type=int, default=21, help="per run, a save every 5; default: 21")
    parser.add_argument("--scratch", type=Path, help="folder on the disk under test; default: the temporary folder")
    # Every figure needs the first peer, Hugging Face.
    parser.add_argument(
        "--without", choices=PEERS[1:], nargs="+", default=[], help="peers to leave out, such as dlrover"
    )
    parser.add_argument(
        "--resumes", type=pair_count, metavar="N", help="measure only N resumes from memory and N from the disk"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    options = parser.parse_args()
    if options.resumes and options.docs:
        parser.error("--docs writes the page of the whole benchmark, and --resumes leaves most of it out")
    full = Scale(options.rounds, options.steps, PEERS, tries=3, slow_steps=80)
    scale = SMOKE if options.smoke else QUICK if options.quick else full
    scale = replace(scale, peers=[name for name in scale.peers if name not in options.without])
    if "dlrover" in scale.peers and not options.resumes:
        make_venv(DLROVER_VENV, DLROVER_PACKAGES, "DLRover and torch")
    random.seed(options.seed)

    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=options.scratch))
    runs = CheckpointRuns(scratch, shape=scale.shape, small_shape=scale.small_shape, save_every=scale.save_every)
    measured = Measured()
    try:
        for number in range(0 if options.resumes else scale.rounds):
            measure_round(runs, measured, scale, f"round {number + 1}/{scale.rounds}")
        for _ in range(options.resumes or 0):
            measure_resume(runs, measured)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    figures = resume_figures(measured.resumes) if options.resumes else figures_of(measured)
    table = table_of(measured)
    rows = [f"| `{name}` | {value:.4g} |" for name, value in figures.items()]
    print("" if options.resumes else f"\n{table}\n")
    print("\n".join(rows))
    write_figures(options.json, figures)
    if options.docs:
        plot(measured, options.docs / "checkpoint.svg")
        (options.docs / PAGE).write_text(page_of(measured, scale, table, rows))


if __name__ == "__main__":
    main()
