"""`runner plan`: put together, and shown."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpointing.errors import CheckpointError
from checkpointing.memory import available_bytes
from runner.config.schema import Config
from runner.config.topology import shape_of
from runner.errors import UsageError
from runner.hardware.gpus import find_gpus
from runner.plan.advice import Option, Saving, choose, options, outlook, saving
from runner.plan.memory import Job
from runner.plan.model_shape import Anatomy, examine_model
from runner.simulate.engine import Forecast
from runner.simulate.scenario import GPU_MTTF_S, HOUR_S, Scenario
from runner.text import duration, gb

# Of page-locked memory over PCIe 4.0 x16, where it cannot be measured without starting CUDA.
_GPU_COPY_RATE = 20e9
_COPY_PROBE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class Assumptions:
    """What the user says; None where the plan is to find out, or to suppose."""

    gpus: int | None = None
    gpu_memory: int | None = None
    step_s: float | None = None
    work_hours: float = 24.0
    mttf_hours: float | None = None
    reclaims_per_day: float = 1.0
    copy_rate: float | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that was found. `outlooks`: by way of renting, the forecast and its cost."""

    model: Anatomy
    memory_bytes: int
    machines: int
    local_ranks: int
    options: list[Option]
    chosen: Option | None
    why: str
    saving: Saving | None
    rates: dict[str, float]
    mttf_s: float
    supposed: list[str]
    outlooks: dict[str, tuple[Forecast, float | None]]
    currency: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": asdict(self.model),
            "memory_bytes": self.memory_bytes,
            "machines": self.machines,
            "ranks_per_machine": self.local_ranks,
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
            "supposed": self.supposed,
            "outlooks": {name: {**asdict(seen), "cost": cost} for name, (seen, cost) in self.outlooks.items()},
        }


def make_plan(config: Config, given: Assumptions) -> Plan:
    """Compute it.

    Raises:
        UsageError: the model cannot be examined, or the checkpoints' place cannot be used.
    """
    found, supposed = find_gpus(), []
    on_gpu = bool(found) or given.gpus is not None or given.gpu_memory is not None
    machines, nproc = shape_of(config, given.gpus or len(found))
    if given.gpu_memory is not None:
        memory = given.gpu_memory
    elif found:
        memory = min(gpu.memory_bytes for gpu in found)
    elif on_gpu:
        raise UsageError("--gpus needs --gpu-memory, as there is no GPU here: for example --gpu-memory 80GiB")
    else:
        memory = available_bytes() // nproc
    model = examine_model(config)
    job = Job.of(config, machines * nproc, nproc, on_gpu=on_gpu)
    ways = options(model, job, memory)
    chosen, why = choose(ways, job)
    mttf_s = (given.mttf_hours or 0.0) * HOUR_S
    if config.cost.price_per_hour is None:
        supposed.append(
            "no price: set cost.price_per_hour (of one machine) and cost.spot_discount to see what it costs"
        )
    if not mttf_s:
        mttf_s = GPU_MTTF_S / (machines * nproc)
        supposed.append(
            f"a failure every {duration(mttf_s)}: {machines * nproc} ranks, each as reliable as a GPU of Meta's"
        )
    if chosen is None:
        return Plan(
            model, memory, machines, nproc, ways, None, why, None, {}, mttf_s, supposed, {}, config.cost.currency
        )
    if given.copy_rate is not None:
        copy_rate = given.copy_rate
    elif on_gpu:
        copy_rate = _GPU_COPY_RATE
        supposed.append(f"{copy_rate / 1e9:.0f} GB/s from a GPU into memory (--copy-rate)")
    else:
        copy_rate = _memory_rate()
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
        machine_share=0.5 if machines * nproc > 1 else 0.1,
    )
    if given.step_s is None:
        supposed.append("a step that is long enough to copy a snapshot beside it (--step-seconds)")
    arenas = gb(chosen.need.arenas)
    supposed.append(
        f"{arenas} of each machine's memory for two snapshots; what writing costs the processor is left out"
    )
    price, discount = config.cost.price_per_hour, config.cost.spot_discount
    outlooks = {"on demand": outlook(scenario, price, machines)}
    if given.reclaims_per_day > 0:
        spot = scenario.with_(reclaim_s=24 * HOUR_S / (given.reclaims_per_day * machines))
        name = f"spot, {given.reclaims_per_day:g} reclaims a day and machine"
        outlooks[name] = outlook(spot, price * (1 - discount) if price is not None else None, machines)
    supposed.append(
        f"start {duration(scenario.first_start_s)}, restart {duration(scenario.restart_s)}, a new machine after "
        f"{duration(scenario.machine_wait_s)} (`runner simulate --from RUN` takes a run's own)"
    )
    rates = {"copy": copy_rate, "write": write_rate, "read": read_rate}
    currency = config.cost.currency
    return Plan(
        model, memory, machines, nproc, ways, chosen, why, prices, rates, mttf_s, supposed, outlooks, currency
    )  # fmt: skip


def render(plan: Plan) -> RenderableType:
    """As tables."""
    where = "GPU" if plan.options[0].need.on_gpu else "rank"
    title = Text.assemble(
        (f"{plan.model.parameters / 1e6:,.1f} M parameters", "bold"),
        f", {plan.machines} machine(s) of {plan.local_ranks} ranks, {gb(plan.memory_bytes)} per {where}",
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
                f"a checkpoint of {gb(size)}: training waits {1000 * save.stall_s:.1f} ms, the copy takes "
                f"{save.copy_s:.2f} s beside it, the write {save.write_s:.1f} s behind it, reading {save.read_s:.1f} s",
            )
        )
        parts.append(
            Text.assemble(
                ("interval  ", "dim"),
                f"a snapshot every {duration(save.snapshot_interval_s)}, a checkpoint every "
                f"{duration(save.commit_interval_s)} (Young and Daly, for a failure every {duration(plan.mttf_s)}; "
                "never above the cap on overhead, nor more often than one is written); checkpoint.snapshot_steps and "
                "save_steps auto weigh the prices that they measure",
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
    parts += [Text(f"supposed: {text}", "dim") for text in plan.supposed]
    return Group(*parts)


def _memory_rate() -> float:
    """Bytes per second of a copy within this machine's memory, by one thread."""
    source, target = np.ones(_COPY_PROBE_BYTES, np.uint8), np.ones(_COPY_PROBE_BYTES, np.uint8)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return _COPY_PROBE_BYTES / min(seconds)


def _rates(config: Config, state_bytes: int) -> tuple[float, float]:
    """Bytes per second that are written and read where checkpoints go, measured there.

    Raises:
        UsageError: it cannot be used.
    """
    storage = config.tiers.durable
    try:
        storage.probe()
        rates = storage.measure(state_bytes)
    except (CheckpointError, OSError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"checkpoint.location={storage.location!r} cannot be used: {text}") from None
    if rates is None:
        raise UsageError(f"checkpoint.location={storage.location!r} has no room to measure by; make some")
    # Where reading cannot be measured, it is seldom slower.
    return rates.write, rates.read or rates.write
