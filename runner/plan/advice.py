"""Recommendations: which strategy fits and why, how often to save, and the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.snapshot.cadence import best_interval_s
from runner.journal.ledger import NOT_RUNNING
from runner.plan.memory_need import ModelShape, Need, PlannedJob, estimate
from runner.plan.simulate.engine import Forecast, forecast
from runner.plan.simulate.scenario import HOUR_S, Scenario

# Above this share, gaps of the allocator or the longest batch run out of memory.
_USABLE_SHARE = 0.92
# Seconds for which a snapshot blocks the training thread: fixed, and per tensor (docs/benchmarks/checkpoint.md).
_STALL_S, _STALL_PER_TENSOR_S = 0.0005, 5e-6
_RUNS = 200
# The ways to train, simplest first: name, method, strategy, and why it is chosen where those before it do not fit.
_WAYS = (
    ("full, DDP", "full", "ddp", "every GPU holds the whole model, which is simplest and fastest"),
    ("full, FSDP", "full", "fsdp", "the model's state exceeds one GPU, but not all GPUs of a node"),
    ("full, FSDP over all nodes", "full", "fsdp_all_nodes", "the model's state exceeds a node, but not all of them"),
    (
        "LoRA, DDP",
        "lora",
        "ddp",
        "full fine-tuning fits neither whole nor sharded; with adapters the base needs no optimizer state",
    ),
    ("LoRA, FSDP", "lora", "fsdp", "the base exceeds one GPU, but not all GPUs of a node"),
    ("LoRA, FSDP over all nodes", "lora", "fsdp_all_nodes", "the base exceeds a node, but not all of them"),
    ("QLoRA, DDP", "qlora", "ddp", "the base is too large even in 16 bits"),
    ("QLoRA, FSDP", "qlora", "fsdp", "the base exceeds one GPU even in 4 bits, but not all GPUs of a node"),
    (
        "QLoRA, FSDP over all nodes",
        "qlora",
        "fsdp_all_nodes",
        "the base exceeds a node even in 4 bits, but not all of them",
    ),
)


@dataclass(frozen=True)
class Option:
    """One way to train, and why it cannot be used (empty if it can)."""

    name: str
    job: PlannedJob
    need: Need
    obstacle: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can be used."""
        return not self.obstacle


@dataclass(frozen=True)
class Saving:
    """Durations and intervals of snapshots and checkpoints, in seconds."""

    copy_s: float  # Copying a snapshot from the device into memory, while training continues.
    stall_s: float  # How long training waits per snapshot.
    write_s: float  # Writing a checkpoint.
    read_s: float  # Reading a checkpoint.
    snapshot_interval_s: float  # Between snapshots: optimal (Young, Daly) within the cap on overhead.
    commit_interval_s: float  # Between commits: the same, and at least as long as a commit takes.


def options(model: ModelShape, job: PlannedJob, memory_bytes: int) -> list[Option]:
    """Evaluate the supported strategies, simplest first, for the memory of a GPU, or of this node per rank."""
    found = []
    ways = [(name, method, strategy) for name, method, strategy, _ in _WAYS]
    if job.strategy == "deepspeed":
        kind = {"full": "full", "lora": "LoRA"}.get(job.method, job.method)
        ways.insert(0, (f"{kind}, DeepSpeed ZeRO-{job.zero_stage}", job.method, "deepspeed"))
    if job.strategy == "mesh":
        ways.insert(0, (f"full, mesh of tp {job.tp} x dp_shard {job.dp_shard}", "full", "mesh"))
    for name, method, strategy in ways:
        one = job.by(method, strategy)
        need = estimate(model, one)
        # Without GPUs, all ranks of a node share its memory and its arenas.
        own = need.peak_bytes if job.on_gpu else need.host_bytes + need.arenas // job.local_ranks
        if strategy == "fsdp" and job.local_ranks == 1:
            obstacle = "one rank"
        elif strategy == "mesh" and job.ranks % (job.tp * job.dp_shard):
            obstacle = "other number of ranks"
        elif strategy == "fsdp_all_nodes" and job.ranks == job.local_ranks:
            obstacle = "one node"
        elif method == "qlora" and not job.loaded:
            obstacle = "no model to quantise"
        else:
            obstacle = "" if own <= _USABLE_SHARE * memory_bytes else "too large"
        found.append(Option(name, one, need, obstacle))
    return found


def choose(found: Sequence[Option], wanted: PlannedJob) -> tuple[Option | None, str]:
    """Choose the configured strategy if it fits, else the simplest that does.

    Returns:
        The choice (None if nothing fits), and the reason.
    """
    configured = next(o for o in found if (o.job.method, o.job.strategy) == (wanted.method, wanted.strategy))
    if configured.fits:
        return configured, "as configured, and it fits"
    best = next((option for option in found if option.fits), None)
    if best is None:
        return None, (
            "nothing fits: lower trainer.per_device_train_batch_size or max_length, set gradient_checkpointing, or "
            "use more or larger GPUs"
        )
    why = next(why for name, *_, why in _WAYS if name == best.name)
    return best, f"{configured.name} does not fit; {why}"


def saving(
    model: ModelShape,
    need: Need,
    mttf_s: float,
    overhead_cap: float,
    *,
    local_ranks: int,
    copy_rate: float,
    write_rate: float,
    read_rate: float,
    step_s: float | None,
    adapters: bool,
) -> Saving:
    """Estimate durations and optimal intervals.

    Args:
        model: The model.
        need: Memory of a rank.
        mttf_s: Mean time between failures of the run in seconds.
        overhead_cap: Share of the time that snapshots may cost.
        local_ranks: Ranks per node.
        copy_rate: Bytes per second from a device into memory, per rank.
        write_rate: To storage, in bytes per second.
        read_rate: From storage, in bytes per second.
        step_s: Seconds of an optimizer step, if known.
        adapters: Whether only adapters are trained.
    """
    copy_s = need.checkpoint_bytes / local_ranks / copy_rate
    tensors = (model.adapter_tensors if adapters else model.tensors) * 4
    stall_s = _STALL_S + _STALL_PER_TENSOR_S * tensors
    if step_s is not None:
        # The copy overlaps forward and backward; only the excess delays the optimizer.
        stall_s += max(copy_s - step_s, 0.0)
    write_s, read_s = need.checkpoint_bytes / write_rate, need.checkpoint_bytes / read_rate
    # Copies do not overlap.
    snapshot = max(best_interval_s(stall_s, mttf_s, overhead_cap), copy_s)
    if step_s is not None:
        snapshot = max(math.ceil(snapshot / step_s), 1) * step_s
    # Writing overlaps training and costs nothing here, but only one checkpoint is written at a time.
    commit = max(snapshot, write_s)
    return Saving(copy_s, stall_s, write_s, read_s, snapshot, commit)


def outlook(scenario: Scenario, price_per_hour: float | None, nnodes: int) -> tuple[Forecast, float | None]:
    """Forecast goodput, and cost if a node's price is known: while one is missing, the others wait and are paid."""
    seen = forecast(scenario, _RUNS)
    if price_per_hour is None:
        return seen, None
    paid_s = seen.wall_s * nnodes - seen.seconds.get(NOT_RUNNING, 0.0)
    return seen, paid_s / HOUR_S * price_per_hour
