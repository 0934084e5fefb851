"""Bytes that a rank needs, by what holds them.

Weights, gradients and optimizer state are counted. Activations follow "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198), counted anew for the layers of today's models: RMSNorm, gated MLP, grouped
queries, attention that keeps no matrix unless it drops some of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runner.config.schema import Config
from runner.plan.model_shape import Anatomy

# Bits per weight of 4-bit NormalFloat with double quantisation: 4 + 8 / 64 + 32 / (64 * 256) (arXiv 2305.14314).
_NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# Of one GPU, before any tensor: CUDA's context, NCCL's and cuBLAS's buffers.
CUDA_BASE_BYTES = 1_200_000_000
# Of a rank's process, besides what it has imported: rows, tokenizer, process group (measured: docs/guides/planning.md).
_RANK_OWN_BYTES = 40_000_000
# Layers' worth of activations beyond those that are kept: gradients of the layer that is on its way back, what the
# forward pass holds for a moment, and on a CPU the allocator's gaps (measured there: docs/guides/planning.md).
_PASSING_LAYERS_GPU, _PASSING_LAYERS_CPU = 1, 3
# TRL's loss takes so many tokens and words of the vocabulary at a time; on a CPU with so many copies in fp32 beside it
# (fitted: docs/guides/planning.md).
_TILE_TOKENS, _TILE_WORDS, _TILE_COPIES_CPU = 4096, 32_768, 3
# SFTConfig's own defaults.
_MICRO_BATCH = 8
_MAX_LENGTH = 1024


@dataclass(frozen=True)
class Job:
    """What decides on memory, besides the model.

    Attributes:
        method: full, lora or qlora. strategy: ddp or fsdp.
        ranks: of all machines; local_ranks: of one of them.
        weight_bytes: per element of the trained or frozen weights.
        compute_bytes: per element of activations: 2 under bf16 or fp16.
        micro_batch: sequences per rank and pass; length: tokens of each.
        loaded: the weights come from a checkpoint; only such a model can be quantised.
        recompute: activations are computed again in the backward pass (gradient checkpointing).
        drops_attention: attention dropout, for which the whole matrix is kept.
        optimizer: the Trainer's name of it.
    """

    method: str
    strategy: str
    ranks: int
    local_ranks: int
    weight_bytes: int
    compute_bytes: int
    micro_batch: int
    length: int
    accumulation: int
    loaded: bool
    recompute: bool
    drops_attention: bool
    on_gpu: bool
    optimizer: str = "adamw_torch_fused"

    @classmethod
    def of(cls, config: Config, ranks: int, local_ranks: int, *, on_gpu: bool) -> Job:
        """As `runner start` would train."""
        trainer: Mapping[str, Any] = config.trainer
        fp16 = bool(trainer.get("fp16", False))
        bf16 = bool(trainer.get("bf16", on_gpu and not fp16))
        loaded = config.model.name_or_path is not None
        length = int(trainer.get("max_length") or 0)
        return cls(
            method=config.method.type,
            strategy=config.strategy,
            ranks=ranks,
            local_ranks=local_ranks,
            # fp16 keeps its weights in fp32.
            weight_bytes=2 if bf16 and loaded else 4,
            compute_bytes=2 if bf16 or fp16 else 4,
            micro_batch=int(trainer.get("per_device_train_batch_size", _MICRO_BATCH)),
            length=length if length > 0 else _MAX_LENGTH,
            accumulation=int(trainer.get("gradient_accumulation_steps", 1)),
            loaded=loaded,
            # TRL's own name, and its default, goes before the older one.
            recompute=bool(trainer.get("activation_checkpointing", trainer.get("gradient_checkpointing", True))),
            drops_attention=float(config.model.config.get("attention_dropout") or 0.0) > 0,
            on_gpu=on_gpu,
            optimizer=str(trainer.get("optim", "adamw_torch_fused")),
        )

    def by(self, method: str, strategy: str) -> Job:
        """The same job by another method and strategy."""
        return replace(self, method=method, strategy=strategy)


@dataclass(frozen=True)
class Need:
    """Bytes of one rank at its peak; `checkpoint_bytes`: of the whole run's state.

    Attributes:
        base: of the process, or of CUDA, before the model is there.
        buckets: copies: of gradients (DDP), of what is gathered (FSDP), of weights in 16 bits (autocast).
        logits: of the last layer and the loss.
        arenas: of snapshots: this machine's memory, which all its ranks have mapped, and each one's figures show.
        host_base: of the process on this machine, where training is on a GPU.
    """

    base: int
    weights: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    logits: int
    arenas: int
    host_base: int
    checkpoint_bytes: int
    on_gpu: bool

    @property
    def peak_bytes(self) -> int:
        """Of the device that trains."""
        own = self.base + self.weights + self.gradients + self.optimizer + self.buckets + self.activations + self.logits
        return own if self.on_gpu else own + self.arenas

    @property
    def host_bytes(self) -> int:
        """Of this machine's memory, without the arenas' own: those are counted once per machine."""
        return self.host_base if self.on_gpu else self.peak_bytes - self.arenas


def estimate(model: Anatomy, job: Job) -> Need:
    """What a rank of this job needs."""
    adapters, sharded = job.method in ("lora", "qlora"), job.strategy == "fsdp" and job.local_ranks > 1
    trained = model.adapter if adapters else model.parameters
    # accelerate keeps what FSDP2 trains in fp32; PEFT its adapters, but for those of a quantised base.
    held = 4 if sharded else job.weight_bytes
    trained_bytes = {"lora": 4, "qlora": 2}.get(job.method, held)
    weights = model.parameters * held
    if job.method == "qlora":
        weights = int(model.linear * _NF4_BYTES) + (model.parameters - model.linear) * 2
    if adapters:
        weights += model.adapter * trained_bytes
    gradients, optimizer = trained * trained_bytes, trained * _optimizer_bytes(job.optimizer, trained_bytes)
    saved = (model.adapter * trained_bytes if adapters else weights) + optimizer
    buckets = 0
    if sharded:
        # The root's own (embeddings, output) and two layers, one of which is fetched ahead, are whole at a time; so are
        # the gradients of the root and of one layer, and all of them while steps are accumulated.
        root = model.parameters - model.layers * model.largest_layer
        whole = model.parameters if job.accumulation > 1 else root + model.largest_layer
        buckets = (root + 2 * model.largest_layer + whole) * job.compute_bytes
        weights, gradients, optimizer = (part // job.local_ranks for part in (weights, gradients, optimizer))
    else:
        buckets = gradients if job.ranks > 1 else 0
        if held > job.compute_bytes and job.method != "qlora":
            buckets += model.parameters * job.compute_bytes
    activations, logits = _activations(model, job), _logits(model, job)
    return Need(
        base=CUDA_BASE_BYTES if job.on_gpu else model.base_bytes + _RANK_OWN_BYTES,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets,
        activations=activations,
        logits=logits,
        arenas=2 * saved,
        host_base=model.base_bytes + _RANK_OWN_BYTES,
        checkpoint_bytes=saved,
        on_gpu=job.on_gpu,
    )


def _activations(model: Anatomy, job: Job) -> int:
    """What the backward pass needs of the forward one."""
    tokens, size = job.micro_batch * job.length, job.compute_bytes
    # Two norms (input, normalised, scaled) in fp32; queries, keys and values for every head, what attention makes of
    # them, and the same in its projection's order; gate, up, its activation and their product.
    norms = 2 * 2 * model.hidden * 4 + 2 * model.hidden * size
    attention = 5 * model.hidden * size
    layer = tokens * (norms + attention + 4 * model.intermediate * size)
    if job.drops_attention:
        # Probabilities, what was dropped of them, and the mask.
        layer += job.micro_batch * model.heads * job.length * job.length * (2 * size + 1)
    if job.method != "full":
        # Dropout before each adapter keeps its input again.
        layer += tokens * (model.hidden * 4 + model.intermediate) * size
    passing = (_PASSING_LAYERS_GPU if job.on_gpu else _PASSING_LAYERS_CPU) * layer
    if not job.recompute:
        return model.layers * layer + passing
    return model.layers * tokens * model.hidden * size + layer + passing


def _logits(model: Anatomy, job: Job) -> int:
    """What TRL's loss holds: a tile of the output at a time, and its gradients, which are added up in fp32.

    On a GPU a kernel computes the tile's gradient in place (`ChunkedLogProbFunction` of trl 1.16).
    """
    tokens = job.micro_batch * job.length
    tile = min(tokens, _TILE_TOKENS) * min(model.vocab, _TILE_WORDS)
    sums = 4 * tokens * model.hidden + (4 * model.vocab * model.hidden if job.method == "full" else 0)
    return tile * (job.compute_bytes + (0 if job.on_gpu else _TILE_COPIES_CPU * 4)) + sums


def _optimizer_bytes(name: str, element_bytes: int) -> int:
    """Of state per trained weight, by the Trainer's `optim`."""
    if name.startswith(("sgd", "adafactor")):
        return 0  # no momentum by default; rows and columns only
    moments = 1 if name.startswith(("rmsprop", "adagrad", "lion")) else 2
    return moments * (1 if "8bit" in name else element_bytes)
