"""The plan of a run, and its tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpointing.errors import CheckpointError
from checkpointing.host.memory import available_bytes
from runner.config.checks import shape_of
from runner.config.schema import Config
from runner.errors import UsageError
from runner.plan.advice import Option, Saving, choose, options, outlook, saving
from runner.plan.known_shapes import LIBRARIES_BYTES, known_shape
from runner.plan.memory_need import ModelShape, PlannedJob, examine_model
from runner.plan.simulate.engine import Forecast
from runner.plan.simulate.scenario import GPU_MTTF_S, HOUR_S, Scenario
from runner.system.gpus import Gpu, find_gpus
from runner.system.text import duration, gb

# Bytes per second into page-locked memory over PCIe 4.0 x16. Measuring would need a CUDA context.
_GPU_COPY_RATE = 20e9
_COPY_PROBE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class Assumptions:
    """What the user states; None means to measure or to assume."""

    gpus: int | None = None  # GPUs per node.
    gpu_memory: int | None = None  # Memory of a GPU in bytes.
    step_s: float | None = None  # Seconds of an optimizer step.
    work_hours: float = 24.0  # Hours of steps.
    mttf_hours: float | None = None  # Mean hours between failures of the run.
    reclaims_per_day: float = 1.0  # Reclaims of one spot node per day.
    copy_rate: float | None = None  # Bytes per second from a device into memory.


@dataclass(frozen=True)
class Plan:
    """A plan."""

    model: ModelShape
    memory_bytes: int  # Memory of a GPU, or of this node per rank.
    nnodes: int
    local_ranks: int  # Ranks per node.
    options: list[Option]  # The evaluated strategies.
    chosen: Option | None  # The recommended one; None if nothing fits.
    why: str
    saving: Saving | None  # Durations and intervals of saves.
    rates: dict[str, float]  # Bytes per second: copy, write, read.
    mttf_s: float  # Mean seconds between failures of the run.
    assumed: list[str]  # Assumptions, in words.
    outlooks: dict[str, tuple[Forecast, float | None]]  # Forecast and cost, by way of renting.
    currency: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `runner plan --json` prints."""
        return {
            "model": asdict(self.model),
            "memory_bytes": self.memory_bytes,
            "nodes": self.nnodes,
            "ranks_per_node": self.local_ranks,
            "options": [
                {
                    "name": o.name,
                    "fits": o.fits,
                    "obstacle": o.obstacle,
                    "peak_bytes": o.need.peak_bytes,
                    "bytes": asdict(o.need),
                }
                for o in self.options
            ],
            "chosen": self.chosen.name if self.chosen else None,
            "why": self.why,
            "saving": asdict(self.saving) if self.saving else None,
            "rates": self.rates,
            "mttf_s": self.mttf_s,
            "assumed": self.assumed,
            "outlooks": {name: {**asdict(seen), "cost": cost} for name, (seen, cost) in self.outlooks.items()},
        }


def _memory_of_rank(given: Assumptions, found: Sequence[Gpu], nproc: int) -> int:
    """Return the memory of each rank's device, in bytes.

    Raises:
        UsageError: GPUs are assumed, and their memory is not known.
    """
    if given.gpu_memory is not None:
        return given.gpu_memory
    if found:
        return min(gpu.memory_bytes for gpu in found)
    if given.gpus is not None:
        raise UsageError("--gpus needs --gpu-memory on a node without a GPU; pass for example --gpu-memory 80GiB")
    return available_bytes() // nproc


def make_plan(
    config: Config,
    given: Assumptions,
    *,
    find: Callable[[], list[Gpu]] = find_gpus,
    examine: Callable[[Config], ModelShape] = examine_model,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compute the plan.

    Args:
        config: The run.
        given: What the user states.
        find: Returns the GPUs of this node.
        examine: Measures a model whose sizes cannot be computed.
        say: Told what is done next, where that takes seconds.

    Raises:
        UsageError: The model cannot be built, or checkpoint.location cannot be used.
    """
    found, assumed = find(), []
    on_gpu = bool(found) or given.gpus is not None or given.gpu_memory is not None
    nnodes, nproc = shape_of(config, given.gpus or len(found))
    memory = _memory_of_rank(given, found, nproc)
    model = known_shape(config)
    if model is None:
        say("building the model without its weights, to count them; loading torch and transformers may take a minute")
        model = examine(config)
    elif not on_gpu:
        assumed.append(f"{gb(LIBRARIES_BYTES)} of libraries in each process, with torch for CPUs")
    job = PlannedJob.of(config, nnodes * nproc, nproc, on_gpu=on_gpu)
    ways = options(model, job, memory)
    chosen, why = choose(ways, job)
    mttf_s = (given.mttf_hours or 0.0) * HOUR_S
    if config.cost.price_per_hour is None:
        assumed.append("no price; set cost.price_per_hour (of one node) and cost.spot_discount to see the cost")
    if not mttf_s:
        mttf_s = GPU_MTTF_S / (nnodes * nproc)
        assumed.append(
            f"a failure every {duration(mttf_s)}: {nnodes * nproc} ranks, each as reliable as a GPU in Meta's clusters"
        )
    if chosen is None:
        return Plan(model, memory, nnodes, nproc, ways, None, why, None, {}, mttf_s, assumed, {}, config.cost.currency)
    if given.copy_rate is not None:
        copy_rate = given.copy_rate
    elif on_gpu:
        copy_rate = _GPU_COPY_RATE
        assumed.append(f"{copy_rate / 1e9:.0f} GB/s from a GPU into memory (--copy-rate)")
    else:
        copy_rate = _memory_rate()
    say(f"measuring how fast {config.checkpoint_location} is written and read")
    write_rate, read_rate = _rates(config, chosen.need.checkpoint_bytes)
    prices = saving(
        model,
        chosen.need,
        mttf_s,
        config.checkpoint.overhead_cap,
        local_ranks=nproc,
        copy_rate=copy_rate,
        write_rate=write_rate,
        read_rate=read_rate,
        step_s=given.step_s,
        adapters=chosen.job.method != "full",
    )
    scenario = Scenario(
        work_s=given.work_hours * HOUR_S,
        mttf_s=mttf_s,
        restore_storage_s=prices.read_s,
        restore_memory_s=prices.copy_s,
        snapshot_interval_s=prices.snapshot_interval_s,
        snapshot_s=prices.copy_s,
        snapshot_stall_s=prices.stall_s,
        commit_interval_s=prices.commit_interval_s,
        commit_s=prices.write_s,
        node_loss_share=0.5 if nnodes * nproc > 1 else 0.1,
        nodes=nnodes,
        min_nodes=config.launch.min_nodes or nnodes,
        grow_interval_s=config.launch.grow_interval_s,
    )
    if given.step_s is None:
        assumed.append("steps long enough to hide the copy of a snapshot (--step-seconds)")
    arenas = gb(chosen.need.arenas)
    assumed.append(f"{arenas} of memory per node for two snapshots; CPU time of writing is ignored")
    price, discount = config.cost.price_per_hour, config.cost.spot_discount
    outlooks = {"on demand": outlook(scenario, price, nnodes)}
    if given.reclaims_per_day > 0:
        spot = scenario.with_(reclaim_s=24 * HOUR_S / (given.reclaims_per_day * nnodes))
        name = f"spot, {given.reclaims_per_day:g} reclaims per node and day"
        outlooks[name] = outlook(spot, price * (1 - discount) if price is not None else None, nnodes)
    assumed.append(
        f"start {duration(scenario.first_start_s)}, restart {duration(scenario.restart_s)}, a replacement node after "
        f"{duration(scenario.node_wait_s)} (`runner simulate --from RUN` measures them from a run)"
    )
    rates = {"copy": copy_rate, "write": write_rate, "read": read_rate}
    currency = config.cost.currency
    return Plan(
        model, memory, nnodes, nproc, ways, chosen, why, prices, rates, mttf_s, assumed, outlooks, currency
    )  # fmt: skip


def render(plan: Plan) -> RenderableType:
    """Return the plan as tables."""
    where = "GPU" if plan.options[0].need.on_gpu else "rank"
    title = Text.assemble(
        (f"{plan.model.parameters / 1e6:,.1f} M parameters", "bold"),
        f", {plan.nnodes} node(s) of {plan.local_ranks} ranks, {gb(plan.memory_bytes)} per {where}",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("per rank", style="dim")
    for option in plan.options:
        table.add_column(option.name, justify="right", style="bold" if option is plan.chosen else "")
    for name in ("weights", "gradients", "optimizer", "buckets", "activations", "logits", "base", "arenas"):
        table.add_row(name, *(gb(getattr(option.need, name)) for option in plan.options))
    table.add_row("peak", *(gb(option.need.peak_bytes) for option in plan.options))
    marks = (Text("yes", "green") if option.fits else Text(f"no: {option.obstacle}", "red") for option in plan.options)
    table.add_row("fits", *marks)
    parts: list[RenderableType] = [title, Text(), table, Text()]
    verdict = plan.chosen.name if plan.chosen else "none"
    parts.append(Text.assemble(("strategy  ", "dim"), (verdict, "bold"), f": {plan.why}"))
    if plan.chosen is not None and plan.saving is not None:
        save, size = plan.saving, plan.chosen.need.checkpoint_bytes
        parts.append(
            Text.assemble(
                ("saving    ", "dim"),
                f"a checkpoint of {gb(size)}: training waits {1000 * save.stall_s:.1f} ms; in the background the copy "
                f"takes {save.copy_s:.2f} s and the write {save.write_s:.1f} s; reading takes {save.read_s:.1f} s",
            )
        )
        parts.append(
            Text.assemble(
                ("interval  ", "dim"),
                f"a snapshot every {duration(save.snapshot_interval_s)}, a checkpoint every "
                f"{duration(save.commit_interval_s)} (Young and Daly, for a failure every {duration(plan.mttf_s)}; "
                "within the cap on overhead, and no more often than a checkpoint can be written); auto in "
                "checkpoint.snapshot_steps and save_steps adapts them to measured costs",
            )
        )
        rates = ", ".join(f"{name} {rate / 1e6:,.0f} MB/s" for name, rate in plan.rates.items())
        parts.append(Text.assemble(("rates     ", "dim"), rates))
        outcome = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("rented", "goodput", "wall time", "cost"):
            outcome.add_column(name, justify="left" if name == "rented" else "right", no_wrap=name != "rented")
        for name, (seen, cost) in plan.outlooks.items():
            money = f"{cost:,.2f} {plan.currency}" if cost is not None else "-"
            share = f"{100 * seen.goodput:.1f} ± {100 * (seen.high - seen.goodput):.1f} %"
            outcome.add_row(name, share, duration(seen.wall_s), money)
        parts += [Text(), outcome]
    parts += [Text(f"assumed: {text}", "dim") for text in plan.assumed]
    return Group(*parts)


def _memory_rate() -> float:
    """Measure the bytes per second of a copy within memory by one thread."""
    source, target = np.ones(_COPY_PROBE_BYTES, np.uint8), np.ones(_COPY_PROBE_BYTES, np.uint8)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return _COPY_PROBE_BYTES / min(seconds)


def _rates(config: Config, state_bytes: int) -> tuple[float, float]:
    """Measure the bytes per second of writing to and reading from checkpoint.location.

    Raises:
        UsageError: It cannot be used.
    """
    storage = config.tiers.durable
    try:
        storage.probe()
        rates = storage.measure(state_bytes)
    except (CheckpointError, OSError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"checkpoint.location={storage.location!r} cannot be used: {text}; fix that or set another"
        ) from None
    if rates is None:
        raise UsageError(f"checkpoint.location={storage.location!r} has no space for a measurement; free some")
    # Reading from a disk is rarely slower than writing, and a measurement would only see the page cache.
    return rates.write, rates.read or rates.write
