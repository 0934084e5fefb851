"""State that no node holds whole: ours against torch's DCP and DeepSpeed's own save, on the same model, in turns.

Two nodes (torchruns of this machine) of two ranks each train a model that FSDP2, or DeepSpeed's ZeRO-3, shards over all
four. Then one node of two ranks loads what they have saved, except DeepSpeed's own, which is for the same ranks only.
With a server that is compatible with S3 (Ceph's radosgw, `apt install radosgw ceph-mon ceph-osd ceph-common`), two
nodes behind a link each are compared with one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import command_line, machine, make_parser, scratch_folder, spread, today, undisturbed, write_figures
from sharded_runs import Layout, ShardedRuns
from storage_server import Gateway, gateway, missing_commands

PAGE = "sharded.md"
METHODS = ("dcp plain", "dcp", "ours", "deepspeed zero", "ours zero")
TITLES = {
    "dcp plain": "FSDP2: DCP, process",
    "dcp": "FSDP2: DCP, process, async shared stager",
    "ours": "FSDP2: this project",
    "deepspeed zero": "ZeRO-3: DeepSpeed's `save_checkpoint`",
    "ours zero": "ZeRO-3: this project",
}
# DeepSpeed's own files are for the same ranks only; both variants of DCP write the same.
NOT_LOADED = {"deepspeed zero": "not possible", "dcp plain": "the same files"}
TRAINED_ON, LOADED_ON, ONE_NODE = Layout(2, 2), Layout(1, 2), Layout(1, 2)
ONE_RANK_EACH = Layout(2, 1)
BUCKET = "sharded"
# What writes from one node and from two, and the figure of that.
WRITERS = {"ours whole": "two_writers_speedup", "ours": "two_shard_writers_speedup"}


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Of all variants.
        steps: Of a run.
        save_every: Steps between saves.
        shape: Width and layers: 0.9 GB of weights and AdamW state.
        link_shape: The same for the runs behind links: 0.45 GB.
        link_mbit_per_s: Rate of each node's link.
        export_bytes: Size of the checkpoint to export.
        tries: Repetitions of a disturbed run.
    """

    rounds: int
    # Six saves: of three, the median says little.
    steps: int = 19
    save_every: int = 3
    shape: tuple[int, int] = (1024, 6)
    link_shape: tuple[int, int] = (768, 4)
    link_mbit_per_s: int = 200
    export_bytes: int = 10**10
    tries: int = 3


FULL, QUICK = Scale(4), Scale(1, tries=1)
SMOKE = Scale(
    1, steps=5, save_every=2, shape=(64, 1), link_shape=(64, 1), export_bytes=10**9, tries=1, link_mbit_per_s=1000
)


@dataclass
class Measured:
    """What was measured, by method; times in seconds.

    Attributes:
        blocked: Of every save, on the rank that was blocked longest.
        overhead: Per save: total time less that of the same steps without saves.
        durable: From the call to the durable checkpoint, for a save that nothing else disturbs.
        loaded: From the call on, on the other mesh.
        ready: Before that, until our agent had started.
        peak: Most memory of all processes, in bytes.
        behind_links: By method and number of nodes, from the call to the durable checkpoint.
    """

    state_bytes: int = 0
    blocked: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    overhead: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    durable: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    loaded: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    ready: list[float] = field(default_factory=list)
    peak: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    behind_links: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    export_mb: float = 0.0


def measure_round(runs: ShardedRuns, measured: Measured, scale: Scale, name: str) -> None:
    """Measure every method in random order, and what it has saved on another mesh."""

    def tried(call: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
        return undisturbed(call, what, tries=scale.tries, say=runs.say)

    def trained(method: str, folder: Path) -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        return runs.work("train", method, str(folder), TRAINED_ON, steps=scale.steps, save_every=scale.save_every)

    last = scale.steps + 1
    with scratch_folder(runs.scratch) as folder:
        without = {
            "": tried(lambda: trained("none", folder / "none"), "no saves"),
            "zero": tried(lambda: trained("none zero", folder / "none"), "no saves, ZeRO-3"),
        }
        measured.state_bytes = without[""]["state_bytes"]
        for method in random.sample(METHODS, len(METHODS)):
            run = tried(lambda method=method: trained(method, folder / method), method)  # type: ignore[misc]
            plain = without["zero" if method.endswith("zero") else ""]
            measured.blocked[method] += run["blocked_s"]
            measured.overhead[method].append((run["total_s"] - plain["total_s"]) / len(run["blocked_s"]))
            measured.durable[method].append(run["durable_s"])
            measured.peak[method].append(run["peak_bytes"])
            runs.say(f"{name}, {method}: blocked {spread(run['blocked_s'], 4)}, durable {run['durable_s']:.2f} s")
            if method in NOT_LOADED:
                continue
            # Ours writes past the page cache, DCP through it.
            read_all(folder / method)
            load = tried(
                lambda method=method: runs.work("load", method, str(folder / method), LOADED_ON, steps=last),  # type: ignore[misc]
                f"{method}, load",
            )
            measured.loaded[method].append(load["load_s"])
            measured.ready += [load["ready_s"]] if method == "ours" else []
            runs.say(f"{name}, {method}: load on another mesh {load['load_s']:.2f} s")


def read_all(folder: Path) -> None:
    """Read all files below a folder, so that they are in the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(4 << 20):
                    pass


@contextlib.contextmanager
def links(server: Gateway, number: int, mbit_per_s: int) -> Iterator[list[dict[str, str]]]:
    """Yield, for each node, what it reaches the server by: a link of its own."""
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(server.behind_slow_link(1.0, mbit_per_s))[0] for _ in range(number)]
        # The user's own settings do not count.
        own = {**server.environment, "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
        yield [{**own, "AWS_ENDPOINT_URL": endpoint} for endpoint in endpoints]


def measure_links(runs: ShardedRuns, measured: Measured, scale: Scale, server: Gateway) -> None:
    """Measure one save by two ranks: of one node, and of two, each behind a link of its own."""
    for method, (number, layout) in itertools.product(WRITERS, ((1, ONE_NODE), (2, ONE_RANK_EACH))):
        with links(server, number, scale.link_mbit_per_s) as environments:
            location = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            run = runs.work("train", method, location, layout, steps=2, save_every=2, environments=environments)
        measured.behind_links.setdefault((method, number), []).append(run["durable_s"])
        runs.say(f"{method}, nodes behind links, {number}: durable after {run['durable_s']:.2f} s")
        server.free_memory()


def figures_of(measured: Measured) -> dict[str, float]:
    """Return the figures, those that were measured."""

    def ratio(values: dict[str, list[float]], ours: str = "ours", peer: str = "dcp") -> float:
        return statistics.median(values[ours]) / statistics.median(values[peer])

    figures = {
        "blocked_vs_dcp": ratio(measured.blocked, peer="dcp plain"),
        "blocked_vs_quickest_dcp": ratio(measured.blocked),
        "durable_vs_dcp": ratio(measured.durable),
        "reshard_load_vs_dcp": ratio(measured.loaded),
        "agent_start_s": statistics.median(measured.ready),
        "peak_memory_vs_dcp": ratio(measured.peak),
        "blocked_vs_deepspeed": ratio(measured.blocked, "ours zero", "deepspeed zero"),
        "durable_vs_deepspeed": ratio(measured.durable, "ours zero", "deepspeed zero"),
        "export_memory_mb": measured.export_mb,
    }
    for method, figure in WRITERS.items():
        if (method, 2) in measured.behind_links:
            one, two = (statistics.median(measured.behind_links[method, number]) for number in (1, 2))
            figures[figure] = one / two
    return figures


def table_of(measured: Measured) -> str:
    rows = [
        "| method | blocked, s | overhead, s | durable, s | load on another mesh, s | peak memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        memory = [nbytes / 1e9 for nbytes in measured.peak[method]]
        cells = [
            spread(measured.blocked[method], 4),
            spread(measured.overhead[method]),
            spread(measured.durable[method]),
            NOT_LOADED.get(method) or spread(measured.loaded[method]),
            spread(memory),
        ]
        rows.append(f"| {TITLES[method]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def page_of(measured: Measured, scale: Scale, table: str, rows: Sequence[str]) -> str:
    figures = "\n".join(["| figure | value |", "|---|---|", *rows])
    return (
        "# State that no node holds whole\n\n"
        f"`{command_line('sharded.py')}`, {today()}, on {machine()}; two nodes (torchruns of this machine) of two "
        f"ranks, 1 thread each, {measured.state_bytes / 1e9:.2f} GB of weights and AdamW state in fp32, sharded "
        f"over all four ranks, a save every {scale.save_every} steps, {scale.rounds} round(s) of {scale.steps} steps. "
        "Per save: median (quartiles); a first save, in which DCP starts its process, is not counted. Blocked is that "
        "of the slowest rank. Overhead is (total time - total time without saves) / saves. Durable is that of a save "
        'while nothing trains. "Load on another mesh": one node of two ranks that have just started and '
        "never trained, the files in the page cache; DCP with `get_state_dict` and `set_state_dict`, ours with every "
        "byte verified, which DCP does not do. Our agent runs by then, as under `runner start`; a loop by itself waits "
        "for it once (`agent_start_s`)."
        f"\n\n{table}\n\n{figures}\n\n"
        f"`two_writers_speedup`: two ranks that hold the whole state save to S3 (radosgw) through links of "
        f"{scale.link_mbit_per_s} Mbit/s, on one node with one link, and on two with one each; "
        "`two_shard_writers_speedup`: the same of state that is sharded over both. "
        "`export_memory_mb`: peak resident memory of "
        f"`runner checkpoints export` of a checkpoint of {scale.export_bytes / 1e9:.0f} GB in eight shards.\n"
    )


def main() -> None:
    parser = make_parser(__doc__, PAGE, quick="one round", smoke="a tiny model")
    parser.add_argument("--scratch", type=Path, help="folder on the disk under test; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    options = parser.parse_args()
    scale = SMOKE if options.smoke else QUICK if options.quick else FULL
    random.seed(options.seed)
    scratch = Path(tempfile.mkdtemp(prefix="sharded-bench-", dir=options.scratch))
    runs, measured = ShardedRuns(scratch, scale.shape), Measured()
    try:
        for number in range(scale.rounds):
            measure_round(runs, measured, scale, f"round {number + 1}/{scale.rounds}")
        if missing_commands():
            runs.say("two nodes behind links: left out, radosgw is not installed")
        else:
            with gateway(scratch / "server") as server:
                server.make_bucket(BUCKET)
                behind = ShardedRuns(scratch, scale.link_shape, runs.say)
                for _ in range(scale.rounds):
                    measure_links(behind, measured, scale, server)
        measured.export_mb = runs.export_memory(scale.export_bytes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.sync()
    figures, table = figures_of(measured), table_of(measured)
    rows = [f"| `{name}` | {value:.4g} |" for name, value in figures.items()]
    print(f"\n{table}\n")
    print("\n".join(rows))
    write_figures(options.json, figures)
    if options.docs:
        (options.docs / PAGE).write_text(page_of(measured, scale, table, rows))


if __name__ == "__main__":
    main()
