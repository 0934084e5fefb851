"""State that no node holds whole: ours against torch's DCP and DeepSpeed's own save, on the same model, in turns.

Two nodes (torchruns of this machine) of two ranks each train a model that FSDP2, or DeepSpeed's ZeRO-3, shards over all
four. Then one node of two ranks loads what they have saved, except DeepSpeed's own, which is for the same ranks only.
With a server that is compatible with S3 (Ceph's radosgw, `apt install radosgw ceph-mon ceph-osd ceph-common`), two
nodes behind a link each are compared with one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import shutil
import statistics
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import Benchmark
from library.figures import Samples, figure_table, spread, table
from library.gateway import Gateway, gateway, missing
from library.measuring import read_all, scratch_folder, undisturbed
from sharded.runs import export_memory, work

METHODS = {
    "dcp plain": "FSDP2: DCP, process",
    "dcp": "FSDP2: DCP, process, async shared stager",
    "ours": "FSDP2: this project",
    "deepspeed zero": "ZeRO-3: DeepSpeed's `save_checkpoint`",
    "ours zero": "ZeRO-3: this project",
}
# DeepSpeed's own files are for the same ranks only; both variants of DCP write the same.
NOT_LOADED = {"deepspeed zero": "not possible", "dcp plain": "the same files"}
# Nodes, and ranks of each.
TRAINED_ON, LOADED_ON, ONE_NODE, ONE_RANK_EACH = (2, 2), (1, 2), (1, 2), (2, 1)
BUCKET = "sharded"
# What writes from one node and from two, and the figure of that.
WRITERS = {"ours whole": "two_writers_speedup", "ours": "two_shard_writers_speedup"}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int  # Of all variants.
    # Six saves: of three, the median says little.
    steps: int = 19  # Of a run.
    save_every: int = 3  # Steps between saves.
    shape: tuple[int, int] = (1024, 6)  # Width and layers: 0.9 GB of weights and AdamW state.
    link_shape: tuple[int, int] = (768, 4)  # The same for the runs behind links: 0.45 GB.
    link_mbit_per_s: int = 200  # Rate of each node's link.
    export_bytes: int = 10**10  # Size of the checkpoint to export.
    tries: int = 3  # Repetitions of a disturbed run.


FULL, QUICK = Scale(4), Scale(1, tries=1)
SMOKE = Scale(
    1, steps=5, save_every=2, shape=(64, 1), link_shape=(64, 1), export_bytes=10**9, tries=1, link_mbit_per_s=1000
)


def measure_round(bench: Benchmark, parent: Path, measured: Samples, scale: Scale, name: str) -> None:
    """Measure every method in random order, and what it has saved on another mesh."""

    def tried(action: str, method: str, folder: Path, layout: tuple[int, int], steps: int) -> dict[str, Any]:
        def run() -> dict[str, Any]:
            if action == "train":
                shutil.rmtree(folder, ignore_errors=True)
            return work(
                parent, scale.shape, action, method, str(folder), layout, steps=steps, save_every=scale.save_every
            )

        return undisturbed(run, f"{method}, {action}", tries=scale.tries, say=bench.say)

    with scratch_folder(parent) as scratch:
        train = functools.partial(tried, "train", layout=TRAINED_ON, steps=scale.steps)
        without = {name: train(name, folder=scratch / "none") for name in ("none", "none zero")}
        measured["bytes", "state"] = [without["none"]["state_bytes"]]
        for method in random.sample(list(METHODS), len(METHODS)):
            folder = scratch / method
            run = train(method, folder=folder)
            plain = without["none zero" if method.endswith("zero") else "none"]
            measured["blocked_s", method] += run["blocked_s"]
            measured["overhead_s", method].append((run["total_s"] - plain["total_s"]) / len(run["blocked_s"]))
            measured["durable_s", method].append(run["durable_s"])
            measured["peak_bytes", method].append(run["peak_bytes"])
            bench.say(f"{name}, {method}: blocked {spread(run['blocked_s'], 4)}, durable {run['durable_s']:.2f} s")
            if method in NOT_LOADED:
                continue
            # Ours writes past the page cache, DCP through it.
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    read_all(path)
            load = tried("load", method, folder, LOADED_ON, scale.steps + 1)
            measured["load_s", method].append(load["load_s"])
            measured["ready_s", method].append(load["ready_s"])
            bench.say(f"{name}, {method}: load on another mesh {load['load_s']:.2f} s")


@contextlib.contextmanager
def links(server: Gateway, number: int, mbit_per_s: int) -> Iterator[list[dict[str, str]]]:
    """Yield, for each node, what it reaches the server by: a link of its own."""
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(server.behind_slow_link(1.0, mbit_per_s)) for _ in range(number)]
        yield [{"AWS_ENDPOINT_URL": endpoint} for endpoint in endpoints]


def measure_links(bench: Benchmark, parent: Path, measured: Samples, scale: Scale, server: Gateway) -> None:
    """Measure one save by two ranks: of one node, and of two, each behind a link of its own."""
    how: Any = {"steps": 2, "save_every": 2}
    for method, layout in itertools.product(WRITERS, (ONE_NODE, ONE_RANK_EACH)):
        number = layout[0]
        with links(server, number, scale.link_mbit_per_s) as environments:
            location = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            run = work(parent, scale.link_shape, "train", method, location, layout, **how, environments=environments)
        measured["behind_links_s", method, str(number)].append(run["durable_s"])
        bench.say(f"{method}, nodes behind links, {number}: durable after {run['durable_s']:.2f} s")
        server.free_memory()


def figures_of(measured: Samples, export_mb: float) -> dict[str, float]:
    """Return the figures, those that were measured."""

    def median(*key: str) -> float:
        return statistics.median(measured[key])

    def ratio(what: str, ours: str = "ours", peer: str = "dcp") -> float:
        return median(what, ours) / median(what, peer)

    figures = {
        "blocked_vs_dcp": ratio("blocked_s", peer="dcp plain"),
        "blocked_vs_quickest_dcp": ratio("blocked_s"),
        "durable_vs_dcp": ratio("durable_s"),
        "reshard_load_vs_dcp": ratio("load_s"),
        "agent_start_s": median("ready_s", "ours"),
        "peak_memory_vs_dcp": ratio("peak_bytes"),
        "blocked_vs_deepspeed": ratio("blocked_s", "ours zero", "deepspeed zero"),
        "durable_vs_deepspeed": ratio("durable_s", "ours zero", "deepspeed zero"),
        "export_memory_mb": export_mb,
    }
    for method, figure in WRITERS.items():
        if measured["behind_links_s", method, "2"]:
            figures[figure] = median("behind_links_s", method, "1") / median("behind_links_s", method, "2")
    return figures


def table_of(measured: Samples) -> str:
    def row(method: str, title: str) -> list[str]:
        return [
            title,
            spread(measured["blocked_s", method], 4),
            spread(measured["overhead_s", method]),
            spread(measured["durable_s", method]),
            NOT_LOADED.get(method) or spread(measured["load_s", method]),
            spread([nbytes / 1e9 for nbytes in measured["peak_bytes", method]]),
        ]

    header = "method | blocked, s | overhead, s | durable, s | load on another mesh, s | peak memory, GB"
    return table(header, itertools.starmap(row, METHODS.items()))


def main() -> None:
    bench = Benchmark("sharded", __doc__, quick="one round", smoke="a tiny model")
    bench.add_scratch("on the disk under test")
    bench.add_seed("of the order within the rounds")
    options = bench.parse()
    scale = bench.scale(FULL, QUICK, SMOKE)
    random.seed(options.seed)
    measured = Samples(list)
    with scratch_folder(options.scratch) as scratch:
        for number in range(scale.rounds):
            measure_round(bench, scratch, measured, scale, f"round {number + 1}/{scale.rounds}")
        if why := missing("radosgw"):
            bench.say(f"two nodes behind links: left out, {why}")
        else:
            with gateway(scratch / "server") as server:
                server.make_bucket(BUCKET)
                for _ in range(scale.rounds):
                    measure_links(bench, scratch, measured, scale, server)
        export_mb = export_memory(scratch, scale.export_bytes)
    figures = figures_of(measured, export_mb)
    bench.publish(
        "State that no node holds whole",
        f"{measured['bytes', 'state'][0] / 1e9:.2f} GB of weights and AdamW state in fp32, a save every "
        f"{scale.save_every} steps, {scale.rounds} round(s) of {scale.steps} steps; links of {scale.link_mbit_per_s} "
        f"Mbit/s; an export of {scale.export_bytes / 1e9:.0f} GB.",
        figures,
        f"{table_of(measured)}\n\n{figure_table(figures)}",
    )


if __name__ == "__main__":
    main()
