"""What checkpoints cost training: ours against the peers, on the same model and steps, in turns.

Every variant runs in a process of its own, in rounds of changing order; the results are medians over all rounds and
ratios of them. `docs/benchmarks/checkpoint.md` has the latest result. The driver itself does not need torch.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.runs import DLROVER_VENV, CheckpointRuns
from library.benchmark import Benchmark
from library.figures import Samples, figure_table, ratios, spread, table
from library.measuring import scratch_folder, undisturbed
from library.workers import make_venv

DLROVER_PACKAGES = ["dlrover==0.6.1", "grpcio==1.85.1", "protobuf==7.36.2", "torch==2.13.0", "numpy"]
TITLES = {
    "none": "none",
    "hf": "HF Trainer, synchronous",
    "dcp-thread": "DCP async, thread",
    "dcp-process": "DCP async, process",
    "dcp-shm": "DCP async, process, shared stager",
    "dcp-shm-async": "DCP async, process, async shared stager",
    "dlrover": "DLRover Flash Checkpoint 0.6.1",
    "ours": "ours",
}
PEERS = [name for name in TITLES if name not in ("none", "ours")]
MODES = {"spare": "a core to spare", "pinned": "all on one core"}
TINY_SHAPE = {"width": 64, "layers": 1, "tokens": 4}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int  # Of all variants.
    steps: int  # Of a run.
    peers: list[str]  # Variants other than this project's and no checkpointing.
    tries: int  # Repetitions of a disturbed run.
    slow_steps: int  # Of a run on a slow disk.
    save_every: int = 5  # Steps between saves.
    # 1.25 GB of weights and AdamW state; a step takes about a second on one core.
    shape: dict[str, int] = field(default_factory=lambda: {"width": 768, "layers": 12, "tokens": 16})
    # For the slow disk.
    small_shape: dict[str, int] = field(default_factory=lambda: {"width": 256, "layers": 8, "tokens": 320})


# With the shared stager DCP's process is always quicker.
QUICK = Scale(1, 11, [name for name in PEERS if name != "dcp-process"], tries=1, slow_steps=40)
# One peer that blocks, and the one with the most parts. DLRover needs an environment of its own.
SMOKE = Scale(1, 5, ["hf", "dcp-shm-async"], tries=1, slow_steps=5, save_every=2, shape=TINY_SHAPE)
SMOKE = replace(SMOKE, small_shape=TINY_SHAPE)


def measure_round(bench: Benchmark, runs: CheckpointRuns, measured: Samples, scale: Scale, name: str) -> None:
    """Measure every variant in both modes, then the disk, the resumes and the slow disk."""
    num_saves = (scale.steps - 1) // scale.save_every
    how = {"steps": scale.steps, "save_every": scale.save_every}
    for mode, title in MODES.items():
        plain_s = 0.0
        for method in ["none", *random.sample(sorted([*scale.peers, "ours"]), len(scale.peers) + 1)]:
            measure = functools.partial(runs.run, method, core=0 if mode == "pinned" else None, **how)
            run = undisturbed(measure, method, tries=scale.tries, say=bench.say)
            measured["bytes", "state"] = [run["state_bytes"]]
            measured["peak_bytes", mode, method].append(run["peak_bytes"])
            if method == "none":
                plain_s = run["total_s"]
            else:
                measured["blocked_s", mode, method] += run["blocked_s"]
                measured["durable_s", mode, method] += run["durable_s"]
                measured["overhead_s", mode, method].append((run["total_s"] - plain_s) / num_saves)
            bench.say(
                f"{name}, {title}, {method}: {run['total_s']:.2f} s, "
                f"blocked {spread(run['blocked_s'], 4)}, durable {spread(run['durable_s'])}"
            )
    nbytes = int(measured["bytes", "state"][0])
    for _ in range(2):
        measured["dd_s", "fdatasync"].append(runs.dd(nbytes, "conv=fdatasync"))
        measured["dd_s", "direct"].append(runs.dd(nbytes, "oflag=direct"))
    bench.say(f"dd: {measured['dd_s', 'fdatasync']} with fdatasync, {measured['dd_s', 'direct']} direct")
    measure_resume(bench, runs, measured)
    pair = runs.slow_disk_pair(steps=scale.slow_steps)
    if pair is None:
        bench.say("slow disk: left out, writes cannot be throttled here (no blkio cgroup)")
        return
    for what, seconds in zip(("saving", "plain"), pair, strict=True):
        measured["slow_step_s", what].append(seconds)
    bench.say(f"slow disk: median step {pair[0]:.3f} s, without saves {pair[1]:.3f} s")


def measure_resume(bench: Benchmark, runs: CheckpointRuns, measured: Samples) -> None:
    memory_s, disk_s = runs.resume_pair()
    measured["resume_s", "memory"].append(memory_s)
    measured["resume_s", "disk"].append(disk_s)
    bench.say(f"resume from memory {memory_s:.2f} s, from disk {disk_s:.2f} s: {disk_s / memory_s:.2f}")


def figures_of(measured: Samples, peers: list[str]) -> dict[str, float]:
    """Return the ratios with a bar; below one is in our favour, except for `ram_resume_speedup`."""

    def median(what: str, mode: str, method: str) -> float:
        return statistics.median(measured[what, mode, method])

    def against(what: str, mode: str) -> tuple[float, float]:
        ours, best = median(what, mode, "ours"), min(median(what, mode, peer) for peer in peers)
        return ours / median(what, mode, "hf"), ours / best

    blocked_hf, blocked_best = against("blocked_s", "spare")
    overhead_hf, overhead_best = against("overhead_s", "pinned")
    durable = median("durable_s", "spare", "ours")
    extra = median("peak_bytes", "spare", "ours") - median("peak_bytes", "spare", "none")
    figures = {
        "blocked_vs_hf": blocked_hf,
        "blocked_vs_best_peer": blocked_best,
        "overhead_vs_hf": overhead_hf,
        "overhead_vs_best_peer": overhead_best,
        "durable_vs_dd": durable / statistics.median(measured["dd_s", "fdatasync"]),
        "durable_vs_direct": durable / statistics.median(measured["dd_s", "direct"]),
        "peak_extra_mb": extra / 1e6,
        "peak_extra_vs_two_states": extra / (2 * measured["bytes", "state"][0]),
        **resume_figures(measured),
    }
    if slow := ratios(measured["slow_step_s", "saving"], measured["slow_step_s", "plain"]):
        figures["slow_disk_step_ratio"] = statistics.median(slow)
    return figures


def resume_figures(measured: Samples) -> dict[str, float]:
    """Return how many times as quick a resume from memory is as one from the disk: in the median, and at worst."""
    speedups = ratios(measured["resume_s", "disk"], measured["resume_s", "memory"])
    return {"ram_resume_speedup": statistics.median(speedups), "ram_resume_speedup_worst": min(speedups)}


def table_of(measured: Samples, peers: list[str]) -> str:
    """Return a Markdown table with one row per variant: medians with quartiles, per save."""

    def row(method: str) -> list[str]:
        return [
            TITLES[method],
            spread(measured["blocked_s", "spare", method], 4 if method == "ours" else 2),
            spread(measured["overhead_s", "spare", method]),
            spread(measured["overhead_s", "pinned", method]),
            spread(measured["durable_s", "spare", method]),
            f"{statistics.median(measured['peak_bytes', 'spare', method]) / 1e9:.2f}",
        ]

    return table(
        " | blocked s | overhead s, a core to spare | overhead s, all on one core | durable s | peak memory GB",
        (row(method) for method in TITLES if method in ("none", "ours", *peers)),
    )


def plot(measured: Samples, path: Path) -> None:
    """Draw blocked time (logarithmic) and overhead per save as bars."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    from matplotlib import pyplot

    methods = [*PEERS, "ours"]
    names = [TITLES[method] for method in methods]
    colours = ["#8a8f98"] * len(PEERS) + ["#1f77b4"]
    panels = [("blocked_s", "spare", "blocked s per save"), ("overhead_s", "pinned", "overhead s per save, one core")]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    for axis, (what, mode, label) in zip(axes, panels, strict=True):
        values = [statistics.median(measured[what, mode, method] or [0.0]) for method in methods]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xscale("log")
    axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    bench = Benchmark(
        "checkpoint",
        __doc__,
        quick="one round of short runs, without DCP's plain process",
        smoke="a tiny model, two peers",
    )
    bench.add_count("--rounds", 4)
    bench.add_count("--steps", 21, "per run, a save every 5")
    bench.add_scratch("on the disk under test")
    # Every figure needs the first peer, Hugging Face.
    bench.parser.add_argument(
        "--without", choices=PEERS[1:], nargs="+", default=[], help="peers to leave out, such as dlrover"
    )
    bench.add_count("--resumes", what="measure only N resumes from memory and N from the disk", metavar="N")
    bench.add_seed("of the order within the rounds")
    options = bench.parse()
    scale = bench.scale(Scale(options.rounds, options.steps, PEERS, tries=3, slow_steps=80), QUICK, SMOKE)
    if options.resumes and options.docs:
        bench.parser.error("--docs writes the page of the whole benchmark, and --resumes leaves most of it out")
    scale = replace(scale, peers=[name for name in scale.peers if name not in options.without])
    if "dlrover" in scale.peers and not options.resumes:
        make_venv(DLROVER_VENV, DLROVER_PACKAGES, "DLRover and torch")
    random.seed(options.seed)

    measured = Samples(list)
    with scratch_folder(options.scratch) as scratch:
        runs = CheckpointRuns(scratch, shape=scale.shape, small_shape=scale.small_shape)
        for number in range(0 if options.resumes else scale.rounds):
            measure_round(bench, runs, measured, scale, f"round {number + 1}/{scale.rounds}")
        for _ in range(options.resumes or 0):
            measure_resume(bench, runs, measured)

    if options.resumes:
        figures = resume_figures(measured)
        bench.publish("", "", figures, figure_table(figures))
        return
    figures = figures_of(measured, scale.peers)
    bench.publish(
        "Checkpoints: what a save costs training",
        f"1 rank, 1 thread, {measured['bytes', 'state'][0] / 1e9:.2f} GB of state, a save every {scale.save_every} "
        f"steps of about 1 s, {scale.rounds} rounds of {scale.steps} steps.",
        figures,
        f"![blocked time and overhead](checkpoint.svg)\n\n{table_of(measured, scale.peers)}\n\n"
        f"`dd` of the same bytes: {spread(measured['dd_s', 'fdatasync'])} s with `conv=fdatasync`, "
        f"{spread(measured['dd_s', 'direct'])} s with `oflag=direct`. Resume from memory "
        f"{spread(measured['resume_s', 'memory'])} s, from the disk with its cache dropped "
        f"{spread(measured['resume_s', 'disk'])} s.\n\n{figure_table(figures)}",
    )
    if options.docs:
        plot(measured, options.docs / "checkpoint.svg")


if __name__ == "__main__":
    main()
