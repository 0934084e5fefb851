"""Memory of a rank, by component, for a model that a process with torch has measured.

Weights, gradients and optimizer state are counted exactly. Activations follow "Reducing Activation Recomputation in
Large Transformer Models" (arXiv 2205.05198), adapted to current layers: RMSNorm, gated MLP, grouped queries, and
attention that stores no matrix unless it has dropout.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from checkpointing.host.interpreter import module_command
from runner.config.schema import Config, MeshConfig
from runner.errors import UsageError

# Bits per weight of 4-bit NormalFloat with double quantisation: 4 + 8 / 64 + 32 / (64 * 256) (arXiv 2305.14314).
_NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# Memory of a GPU before any tensor: CUDA's context, buffers of NCCL and cuBLAS.
CUDA_BASE_BYTES = 1_200_000_000
# Memory of a rank's process besides its imports: rows, tokenizer, process group (measured: docs/guides/planning.md).
_RANK_OWN_BYTES = 40_000_000
# Activations beyond the stored ones, in layers: gradients of the layer in the backward pass, temporaries of the forward
# pass, and on a CPU the gaps of the allocator (measured: docs/guides/planning.md).
_PASSING_LAYERS_GPU, _PASSING_LAYERS_CPU = 1, 3
# TRL's loss works on tiles of this many tokens and vocabulary entries; on a CPU with this many fp32 copies (fitted:
# docs/guides/planning.md).
_TILE_TOKENS, _TILE_WORDS, _TILE_COPIES_CPU = 4096, 32_768, 3
# DeepSpeed's own default of `reduce_bucket_size`, in elements.
_ZERO_BUCKET = 500_000_000
# SFTConfig's own defaults.
_MICRO_BATCH = 8
_MAX_LENGTH = 1024
# Seconds in which the model's process ends.
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ModelShape:
    """Numbers of elements, and sizes of the architecture."""

    parameters: int  # Elements of all parameters.
    tensors: int  # Number of parameter tensors.
    linear: int  # Elements of the linear layers except the output, which QLoRA stores in 4 bits.
    largest_layer: int  # Elements of the largest decoder layer, the unit that FSDP gathers.
    layers: int  # Number of decoder layers.
    hidden: int  # Width of the hidden state.
    intermediate: int  # Width of the MLP.
    heads: int  # Number of attention heads.
    vocab: int  # Size of the vocabulary.
    adapter: int  # Elements that LoRA trains.
    adapter_tensors: int  # Number of tensors that LoRA trains.
    base_bytes: int  # Memory of a process with the imports of a rank, in bytes.


def examine_model(config: Config) -> ModelShape:
    """Build the configured model without its weights, and measure it.

    Raises:
        UsageError: The model cannot be found or built.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config.to_yaml())
        command = module_command("runner.training.measure_model", str(file))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the model could not be built within {_TIMEOUT_S:.0f} s; check that the Hub can be reached"
            ) from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        return ModelShape(**{field.name: int(answer[field.name]) for field in fields(ModelShape)})
    except (ValueError, IndexError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines()
        raise UsageError(f"the model cannot be built: {lines[-1] if lines else 'no reason given'}") from None


@dataclass(frozen=True)
class PlannedJob:
    """What determines memory, besides the model."""

    method: str  # full, lora or qlora.
    strategy: str  # ddp, fsdp, fsdp_all_nodes, deepspeed or mesh.
    ranks: int  # Number of ranks of all nodes.
    local_ranks: int  # Number of ranks per node.
    weight_bytes: int  # Bytes per element of the weights.
    compute_bytes: int  # Bytes per element of activations; 2 with bf16 or fp16.
    micro_batch: int  # Sequences per rank and pass.
    length: int  # Tokens per sequence.
    accumulation: int  # Passes per optimizer step.
    loaded: bool  # Whether the weights come from a checkpoint; only such a model can be quantised.
    recompute: bool  # Whether activations are recomputed in the backward pass (gradient checkpointing).
    drops_attention: bool  # Whether there is attention dropout, for which the whole matrix is stored.
    on_gpu: bool  # Whether ranks train on GPUs.
    optimizer: str = "adamw_torch_fused"  # The optimizer, as the Trainer names it.
    zero_stage: int = 0  # What DeepSpeed shares among all ranks: 1 the optimizer's state, 2 gradients, too, 3 all.
    zero_bucket: int = _ZERO_BUCKET  # Elements that DeepSpeed reduces at a time.
    offloads: bool = False  # Whether DeepSpeed keeps the optimizer's state in host memory.
    tp: int = 1  # Ranks that compute each layer together, with `mesh`.
    dp_shard: int = 1  # Ranks over which such a part is sharded, with `mesh`.

    @property
    def sharing_ranks(self) -> int:
        """Number of ranks that share one copy of the state; with DeepSpeed, of the optimizer's state."""
        of = {"ddp": 1, "fsdp": self.local_ranks, "fsdp_all_nodes": self.ranks, "deepspeed": self.ranks}
        return of.get(self.strategy, self.tp * self.dp_shard)

    @classmethod
    def of(cls, config: Config, ranks: int, local_ranks: int, *, on_gpu: bool) -> PlannedJob:
        """Return the job that `runner start` would run."""
        trainer: Mapping[str, Any] = config.trainer
        fp16 = bool(trainer.get("fp16", False))
        bf16 = bool(trainer.get("bf16", on_gpu and not fp16))
        loaded = config.model.name_or_path is not None
        length = int(trainer.get("max_length") or 0)
        deepspeed = trainer.get("deepspeed")
        zero = deepspeed.get("zero_optimization", {}) if isinstance(deepspeed, dict) else {}
        bucket = zero.get("reduce_bucket_size")
        mesh = config.mesh or MeshConfig()
        return cls(
            method=config.method.type,
            strategy=config.strategy if isinstance(config.strategy, str) else "mesh",
            tp=mesh.tp,
            dp_shard=mesh.dp_shard,
            ranks=ranks,
            local_ranks=local_ranks,
            # fp16 keeps its weights in fp32.
            weight_bytes=2 if bf16 and loaded else 4,
            compute_bytes=2 if bf16 or fp16 else 4,
            micro_batch=int(trainer.get("per_device_train_batch_size", _MICRO_BATCH)),
            length=length if length > 0 else _MAX_LENGTH,
            accumulation=int(trainer.get("gradient_accumulation_steps", 1)),
            loaded=loaded,
            # TRL's own name and its default take precedence over the older name.
            recompute=bool(trainer.get("activation_checkpointing", trainer.get("gradient_checkpointing", True))),
            drops_attention=float(config.model.config.get("attention_dropout") or 0.0) > 0,
            on_gpu=on_gpu,
            optimizer=str(trainer.get("optim", "adamw_torch_fused")),
            zero_stage=int(zero.get("stage", 0)),
            # The Trainer fills in "auto" with the square of the hidden size, which is less.
            zero_bucket=int(bucket) if isinstance(bucket, int | float) else _ZERO_BUCKET,
            offloads=(zero.get("offload_optimizer") or {}).get("device") == "cpu",
        )

    def by(self, method: str, strategy: str) -> PlannedJob:
        """Return the same job with another method and strategy."""
        tp, dp_shard = (self.tp, self.dp_shard) if strategy == "mesh" else (1, 1)
        return replace(self, method=method, strategy=strategy, tp=tp, dp_shard=dp_shard)


@dataclass(frozen=True)
class Need:
    """Memory of one rank at its peak, in bytes."""

    base: int  # The process, or CUDA, before the model is loaded.
    weights: int
    gradients: int
    optimizer: int
    buckets: int  # Copies of gradients (DDP), of gathered parameters (FSDP), of weights in 16 bits (autocast).
    activations: int  # What the backward pass needs.
    logits: int  # The last layer and the loss.
    arenas: int  # Snapshots. Each node has them once, mapped by all of its ranks.
    host_base: int  # The process in host memory if training is on a GPU.
    checkpoint_bytes: int  # State of the whole run, as in a checkpoint.
    on_gpu: bool  # Whether ranks train on GPUs.

    @property
    def peak_bytes(self) -> int:
        """Memory of the device that trains."""
        own = self.base + self.weights + self.gradients + self.optimizer + self.buckets + self.activations + self.logits
        return own if self.on_gpu else own + self.arenas

    @property
    def host_bytes(self) -> int:
        """Host memory without the arenas, which count once per node."""
        return self.host_base if self.on_gpu else self.peak_bytes - self.arenas


def estimate(model: ModelShape, job: PlannedJob) -> Need:
    """Estimate the memory of a rank."""
    adapters, sharded = job.method in ("lora", "qlora"), job.sharing_ranks > 1
    trained = model.adapter if adapters else model.parameters
    # accelerate stores what FSDP2 trains in fp32. PEFT does the same with adapters, except on a quantised base.
    held = 4 if sharded and not adapters else job.weight_bytes
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
        # Gathered at a time are the root's own parameters (embeddings, output) and two layers, one of them prefetched.
        # So are the gradients of the root and of one layer, or all of them with gradient accumulation; those of an
        # adapter are small.
        root = model.parameters - model.layers * model.largest_layer
        at_a_time = model.parameters if job.accumulation > 1 else root + model.largest_layer
        whole = model.adapter if adapters else at_a_time
        layer_bytes = _NF4_BYTES if job.method == "qlora" else job.compute_bytes
        buckets = (root + whole) * job.compute_bytes + int(2 * model.largest_layer * layer_bytes)
        weights, gradients, optimizer = (part // job.sharing_ranks for part in (weights, gradients, optimizer))
    else:
        buckets = gradients if job.ranks > 1 else 0
        if held > job.compute_bytes and job.method != "qlora":
            buckets += model.parameters * job.compute_bytes
    own_host = 0
    if job.strategy == "mesh":
        weights, gradients, optimizer, buckets, saved = _mesh(model, job)
    if job.strategy == "deepspeed":
        weights, gradients, optimizer, buckets, saved = _zero(model, job, trained)
        if job.offloads and job.on_gpu:
            own_host, optimizer = optimizer, 0
    activations, logits = _activations(model, job), _logits(model, job)
    return Need(
        base=CUDA_BASE_BYTES if job.on_gpu else model.base_bytes + _RANK_OWN_BYTES,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets,
        activations=activations,
        logits=logits,
        arenas=2 * saved * job.local_ranks // max(job.sharing_ranks, job.local_ranks),
        host_base=model.base_bytes + _RANK_OWN_BYTES + own_host,
        checkpoint_bytes=saved,
        on_gpu=job.on_gpu,
    )


def _mesh(model: ModelShape, job: PlannedJob) -> tuple[int, int, int, int, int]:
    """Return the bytes of weights, gradients, optimizer and buckets of a rank of a mesh, and of a checkpoint.

    Tensor parallelism cuts the linear layers; the rest (embeddings, norms) is whole on each of its ranks. FSDP2 shards
    what is left of each layer, and gathers two layers at a time.
    """
    held = (model.parameters - model.linear) + model.linear // job.tp
    size, moments = job.weight_bytes, _optimizer_bytes(job.optimizer, job.weight_bytes)
    buckets = 0
    if job.dp_shard > 1:
        root = model.parameters - model.layers * model.largest_layer
        layer = model.largest_layer // job.tp
        whole = held if job.accumulation > 1 else root + layer
        buckets = (root + 2 * layer + whole) * job.compute_bytes
    elif size > job.compute_bytes:
        buckets = held * job.compute_bytes
    own = held // job.dp_shard
    return own * size, own * size, own * moments, buckets, model.parameters * (size + moments)


def _zero(model: ModelShape, job: PlannedJob, trained: int) -> tuple[int, int, int, int, int]:
    """Return the bytes of weights, gradients, optimizer and buckets of a rank under ZeRO, and of a checkpoint.

    The model is in the type that it computes in; the ranks share a copy in full precision, and the moments of that
    (arXiv 1910.02054, with the stages of its table 1).
    """
    size, ranks = job.compute_bytes, job.sharing_ranks
    master = 4 if size < 4 else 0
    state = trained * (master + _optimizer_bytes(job.optimizer, 4))
    if size == 4 and job.zero_stage < 3:
        # Its own copy, in the same precision.
        state += 4 * trained
    weights, gradients = model.parameters * size, trained * size
    bucket = min(job.zero_bucket, trained) * size
    # Two buckets are filled and sent in turn; in stage 3 the parameters of two layers are gathered besides.
    buckets = 2 * bucket + (2 * model.largest_layer * size if job.zero_stage == 3 else 0)
    saved = (model.parameters if job.method == "full" else trained) * size
    saved += trained * (master + _optimizer_bytes(job.optimizer, 4))
    return (
        weights // (ranks if job.zero_stage == 3 else 1),
        gradients // (ranks if job.zero_stage >= 2 else 1),
        state // ranks,
        buckets,
        saved,
    )


def _activations(model: ModelShape, job: PlannedJob) -> int:
    """Return the bytes that the forward pass stores for the backward pass."""
    tokens, size = job.micro_batch * job.length, job.compute_bytes
    # Two norms (input, normalised, scaled) in fp32; queries, keys and values of every head, the output of attention,
    # and the same in the order of its projection; gate, up, its activation and their product.
    norms = 2 * 2 * model.hidden * 4 + 2 * model.hidden * size
    attention = 5 * model.hidden * size
    # Each rank of a tensor parallel group has its part of the heads and of the MLP.
    layer = tokens * (norms + (attention + 4 * model.intermediate * size) // job.tp)
    if job.drops_attention:
        # Probabilities before and after dropout, and the mask.
        layer += job.micro_batch * model.heads // job.tp * job.length * job.length * (2 * size + 1)
    if job.method != "full":
        # Dropout before each adapter stores its input once more.
        layer += tokens * (model.hidden * 4 + model.intermediate) * size
    passing = (_PASSING_LAYERS_GPU if job.on_gpu else _PASSING_LAYERS_CPU) * layer
    if not job.recompute:
        return model.layers * layer + passing
    return model.layers * tokens * model.hidden * size + layer + passing


def _logits(model: ModelShape, job: PlannedJob) -> int:
    """Return the bytes of TRL's loss: one tile of the output at a time, and gradients that are summed in fp32.

    On a GPU a kernel computes the tile's gradient in place (`ChunkedLogProbFunction` of trl 1.16).
    """
    tokens = job.micro_batch * job.length
    tile = min(tokens, _TILE_TOKENS) * min(model.vocab, _TILE_WORDS)
    sums = 4 * tokens * model.hidden + (4 * model.vocab * model.hidden if job.method == "full" else 0)
    return tile * (job.compute_bytes + (0 if job.on_gpu else _TILE_COPIES_CPU * 4)) + sums


def _optimizer_bytes(name: str, element_bytes: int) -> int:
    """Return the bytes of optimizer state per trained weight, by the Trainer's `optim`."""
    if name.startswith(("sgd", "adafactor")):
        return 0  # SGD has no momentum by default; Adafactor stores rows and columns only.
    moments = 1 if name.startswith(("rmsprop", "adagrad", "lion")) else 2
    return moments * (1 if "8bit" in name else element_bytes)
