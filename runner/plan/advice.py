"""What to do: which strategy fits and why, how often to save, what it will cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.rank.cadence import best_interval_s
from runner.journal.ledger import NOT_RUNNING
from runner.plan.memory import Job, Need, estimate
from runner.plan.model_shape import Anatomy
from runner.simulate.engine import Forecast, forecast
from runner.simulate.scenario import HOUR_S, Scenario

# Beyond it an allocator's gaps, and the longest batch, end in "out of memory".
_USABLE_SHARE = 0.92
# What a snapshot costs the training thread: a fixed part, and one per tensor (docs/benchmarks/checkpoint.md).
_STALL_S, _STALL_PER_TENSOR_S = 0.0005, 5e-6
_RUNS = 200


@dataclass(frozen=True)
class Option:
    """One way to train. `obstacle`: why it cannot be used; empty where it can."""

    name: str
    job: Job
    need: Need
    obstacle: str = ""

    @property
    def fits(self) -> bool:
        return not self.obstacle


@dataclass(frozen=True)
class Saving:
    """Snapshots and checkpoints, in seconds.

    Attributes:
        copy_s: from the device into memory, beside training.
        stall_s: for which training waits, per snapshot.
        write_s, read_s: of a checkpoint.
        snapshot_interval_s, commit_interval_s: that lose least (Young, Daly), within the cap on overhead, and for
            commits never shorter than one takes.
    """

    copy_s: float
    stall_s: float
    write_s: float
    read_s: float
    snapshot_interval_s: float
    commit_interval_s: float


def options(model: Anatomy, job: Job, memory_bytes: int) -> list[Option]:
    """The strategies that the runner has, simplest first."""
    found = []
    for name, method, strategy in (
        ("full, DDP", "full", "ddp"),
        ("full, FSDP", "full", "fsdp"),
        ("LoRA, DDP", "lora", "ddp"),
        ("QLoRA, DDP", "qlora", "ddp"),
    ):
        one = job.by(method, strategy)
        need = estimate(model, one)
        # Without GPUs all ranks share this machine's memory, and its arenas.
        own = need.peak_bytes if job.on_gpu else need.host_bytes + need.arenas // job.local_ranks
        if strategy == "fsdp" and job.local_ranks == 1:
            obstacle = "one rank"
        elif method == "qlora" and not job.on_gpu:
            obstacle = "needs a GPU"
        elif method == "qlora" and not job.loaded:
            obstacle = "no model to quantise"
        else:
            obstacle = "" if own <= _USABLE_SHARE * memory_bytes else "too large"
        found.append(Option(name, one, need, obstacle))
    return found


def choose(found: Sequence[Option], wanted: Job) -> tuple[Option | None, str]:
    """The configured way if it fits, else the simplest that does; and why."""
    configured = next(o for o in found if (o.job.method, o.job.strategy) == (wanted.method, wanted.strategy))
    if configured.fits:
        return configured, "as configured, and it fits"
    best = next((option for option in found if option.fits), None)
    if best is None:
        return None, (
            "nothing fits: lower trainer.per_device_train_batch_size or max_length, set gradient_checkpointing, or "
            "take more, or larger, GPUs; tensor parallelism is not there yet"
        )
    why = {
        "full, DDP": "every GPU holds the whole model: the simplest and fastest",
        "full, FSDP": "the model's state is too large for one GPU, and not for all of a machine",
        "LoRA, DDP": "full fine-tuning fits neither whole nor sharded; adapters leave the base without optimizer state",
        "QLoRA, DDP": "even the base is too large in 16 bits",
    }[best.name]
    return best, f"{configured.name} does not fit; {why}"


def saving(
    model: Anatomy,
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
    """Prices and best intervals. Rates: bytes per second, `copy_rate` of one rank."""
    copy_s = need.checkpoint_bytes / local_ranks / copy_rate
    tensors = (model.adapter_tensors if adapters else model.tensors) * 4
    stall_s = _STALL_S + _STALL_PER_TENSOR_S * tensors
    if step_s is not None:
        # Beside forward and backward; what takes longer holds the optimizer up.
        stall_s += max(copy_s - step_s, 0.0)
    write_s, read_s = need.checkpoint_bytes / write_rate, need.checkpoint_bytes / read_rate
    # The next copy cannot begin before this one is done.
    snapshot = max(best_interval_s(stall_s, mttf_s, overhead_cap), copy_s)
    if step_s is not None:
        snapshot = max(math.ceil(snapshot / step_s), 1) * step_s
    # Writing goes on beside training, and has no price here; but one is written at a time.
    commit = max(snapshot, write_s)
    return Saving(copy_s, stall_s, write_s, read_s, snapshot, commit)


def outlook(scenario: Scenario, price_per_hour: float | None, machines: int) -> tuple[Forecast, float | None]:
    """Goodput, and what all machines cost together: while one is missing, the others wait at their price."""
    seen = forecast(scenario, _RUNS)
    if price_per_hour is None:
        return seen, None
    paid_s = seen.wall_s * machines - seen.seconds.get(NOT_RUNNING, 0.0)
    return seen, paid_s / HOUR_S * price_per_hour
