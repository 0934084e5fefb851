"""The bundled job: supervised fine-tuning with TRL's `SFTTrainer`, resumable at every committed step.

A node that joins a running attempt prepares the data of the job first, so that the others do not wait for it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import transformers
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, is_peft_model
from trl import SFTConfig, SFTTrainer

from checkpointing.files.sharding import gathered, is_partitioned
from checkpointing.host.environment import rank_settings
from checkpointing.process import device
from checkpointing.state.param_names import innermost
from checkpointing.storage.durable import fsync_directory, fsync_tree, replace_file
from checkpointing.transformers import load_best, resilient
from runner.config.load import load_config
from runner.config.schema import Config
from runner.system.cache import seal
from runner.training.metrics import AimTracker, MetricsCallback, perplexities
from runner.training.model import BaseWeights, adapter_config, build, load_model
from runner.training.rank import EventSender
from runner.training.training_data import load_training_data

# Seconds that a slow tracker may delay recovery.
_PATIENCE_AT_FAILURE_S = 1.0
# File next to `best_model` with the Trainer's log history over all attempts, and perplexities.
HISTORY_NAME = "training_history.json"
# Options that have no influence on the data, and would set up what only ranks have.
_OF_RANKS = ("deepspeed", "fsdp_config", "tf32", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval")


def run_job(config_path: str, cache: str, sender: EventSender, *, resumes: bool = False) -> None:
    """Train to the end or to a requested stop; rank 0 then publishes `best_model`.

    The cache is a folder for what is computed once: tokenizer, tokenised data. If the job probably `resumes`, weights
    that a checkpoint replaces are not loaded.
    """
    # The supervisor merged the environment into this file; reading variables again could contradict it.
    config = load_config(config_path, environment={})
    rank = int(os.environ["RANK"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    args = training_arguments(config)
    sender.say("reading the data")
    with args.main_process_first(desc="data"):
        dataset, held_back = load_training_data(config.data, Path(cache), seed=args.seed)
    mesh = config.mesh if int(os.environ["WORLD_SIZE"]) > 1 else None
    if mesh is not None and args.use_cpu:
        # accelerate accepts no mesh on a CPU, where trials use the same code path.
        setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)  # noqa: B010
    sender.say("building the model" if config.model.name_or_path is None else "loading the model")
    model, tokenizer = build(
        config.model, config.method, dataset, Path(cache), bf16=args.bf16, seed=args.seed, mesh=mesh
    )
    trackers, metrics = _trackers(config, rank), MetricsCallback()
    callbacks: list[transformers.TrainerCallback] = [metrics, *trackers]
    is_sharded = bool(args.fsdp or args.deepspeed or mesh)
    if resumes and config.model.name_or_path is not None and config.method.type == "full" and not is_sharded:
        load = functools.partial(load_model, config.model, bf16=args.bf16)
        callbacks.append(BaseWeights(model, load, args.device))
    trainer_class = _ShardingOnCpu if args.fsdp and args.use_cpu else SFTTrainer
    sender.say("tokenising the data, and preparing the first step")
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=dataset,
        eval_dataset=held_back,
        processing_class=tokenizer,
        peft_config=adapter_config(config.method),
        callbacks=callbacks,
    )
    if int(os.environ["LOCAL_RANK"]) == 0:
        # Each node may have a cache of its own.
        seal(Path(cache))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer = resilient(
        trainer,
        location=config.checkpoint_location,
        snapshot_steps=config.checkpoint.snapshot_steps,
        buddy_copies=config.checkpoint.buddy_copies,
        save_steps=config.checkpoint.save_steps,
        save_minutes=config.checkpoint.save_minutes,
        overhead_cap=config.checkpoint.overhead_cap,
        check_finite=config.guards.check_finite,
        spike_zscore=config.guards.spike_zscore,
        seekable_stream=config.data.streaming,
        shuffle_samples=config.data.shuffle_samples if config.data.streaming else None,
        virtual_ranks=(config.elastic.virtual_ranks or "auto") if config.elastic.mode == "exact" else None,
        **config.checkpoint.further_retention,
    )
    metrics.watch(trainer)
    # A rank exits without running destructors, so trackers must be closed here.
    try:
        trainer.train()
    except BaseException:
        for tracker in trackers:
            tracker.close(_PATIENCE_AT_FAILURE_S, _PATIENCE_AT_FAILURE_S)
        raise
    for tracker in trackers:
        tracker.close()
    # Otherwise rank 0 has all of the best weights.
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or mesh is not None
    if rank == 0 or is_sharded:
        best = load_best(trainer) if held_back is not None else None
        if rank == 0 and best is not None:
            sender.send_surely("best_model", step=best)
        _publish(trainer, tokenizer, Path(config.output_dir), rank, is_sharded=is_sharded)


def _publish(trainer: transformers.Trainer, tokenizer: Any, output: Path, rank: int, *, is_sharded: bool) -> None:
    """Write the model and the history of its training; where it is sharded, all ranks call this together."""
    model = merged(innermost(trainer.model))
    weights = whole_weights(model, keep=rank == 0) if is_sharded else None
    if rank == 0:
        publish(model, tokenizer, output / "best_model", weights)
        history = [{**entry, **perplexities(entry)} for entry in trainer.state.log_history]
        text = json.dumps(history, indent=1) + "\n"
        replace_file(output / HISTORY_NAME, text.encode(), output / f".{HISTORY_NAME}.tmp")


def _within_nodes(world_size: int, local_world_size: int) -> dict[str, Any]:
    """Return the options that shard a model within each node, and replicate it between nodes."""
    if local_world_size == 1:
        raise ValueError(
            "strategy='fsdp' shards within a node, but each node has only one rank: use ddp or fsdp_all_nodes"
        )
    if local_world_size == world_size:
        return {}
    sizes = ParallelismConfig(dp_replicate_size=world_size // local_world_size, dp_shard_size=local_world_size)
    return {"parallelism_config": sizes}


def training_arguments(config: Config) -> SFTConfig:
    """Return the `SFTConfig` of a run, with the options that the runner sets itself."""
    world_size = int(os.environ["WORLD_SIZE"])
    options = dict(config.trainer)
    if config.scale_learning_rate:
        sharing = config.sharing(rank_settings().planned_ranks or world_size)
        options["learning_rate"] = options.get("learning_rate", 2e-5) * sharing
    if device.kind() is None:
        options["use_cpu"] = True
        # SFTConfig enables bf16 by default, which is slow and less exact on a CPU.
        options.setdefault("bf16", False)
        options.setdefault("dataloader_pin_memory", False)
    if world_size > 1:
        options.setdefault("ddp_backend", device.collective_backend())
        options.setdefault("ddp_find_unused_parameters", False)
        # DDP's default, set explicitly so that it is visible in the saved options.
        options.setdefault("ddp_bucket_cap_mb", 25)
    if config.mesh is not None and world_size > 1:
        # The Trainer itself can save nothing else of such a model.
        options["save_only_model"] = True
    fsdp = options.pop("fsdp_config", None)
    if config.strategy in ("fsdp", "fsdp_all_nodes") and world_size > 1:
        options |= {"fsdp": True, "fsdp_config": {**(fsdp or {}), "version": 2}}
    if config.strategy == "fsdp" and world_size > 1:
        options |= _within_nodes(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    if config.data.has_validation:
        # Every checkpoint needs its metric, so evaluations follow the saves.
        by_step = options.get("save_strategy", "steps") == "steps"
        options.setdefault("eval_strategy", "steps" if by_step else "epoch")
        if by_step:
            # The Trainer's default would be `logging_steps`.
            options.setdefault("eval_steps", options.get("save_steps", SFTConfig.save_steps))
        options["metric_for_best_model"] = config.best_metric
    options.setdefault("report_to", "none")
    options.setdefault("disable_tqdm", True)
    # Not the folder of the checkpoints: the Trainer creates a folder for any name, even a URL, and after training it
    # may remove what looks like its own old checkpoints.
    args = SFTConfig(output_dir=str(Path(config.output_dir) / "trainer"), **options)
    if args.deepspeed and args.use_cpu:
        # On a CPU, accelerate leaves this to the caller.
        import deepspeed

        # It would compile a transport through shared memory, and wait without end for a compiler that was killed.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=device.collective_backend())
    return args


def whole_weights(model: Any, *, keep: bool) -> dict[str, Any]:
    """Gather the state dict of a sharded model on the CPU, tensor by tensor. All ranks must call it.

    Tied weights are gathered once, and stay tied. A rank that does not `keep` the tensors has an empty dict.
    """
    whole = dict[int, Any]()
    weights = dict[str, Any]()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            tensor = gathered(value).detach().cpu()
            whole[id(value)] = tensor if keep else None
        weights[name] = whole[id(value)]
    return weights if keep else {}


def merged(model: Any) -> Any:
    """Return a model that can be loaded by itself. All ranks must call it if the model is sharded.

    An adapter whose base was built for this run is merged into it: the base is stored nowhere else.
    """
    if not is_peft_model(model) or model.config.name_or_path:
        return model
    # An evaluation may have left parts of a sharded model whole; `state_dict` shards them again.
    model.state_dict()
    if any(map(is_partitioned, model.parameters())):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            return model.merge_and_unload()
    return model.merge_and_unload()


def publish(model: Any, tokenizer: Any, target: Path, weights: dict[str, Any] | None = None) -> None:
    """Save model and tokenizer so that a crash leaves either the old or the new folder, complete.

    `weights` are the whole state dict, if the model itself has only a part of it.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if weights is not None:
        # With it, every rank would have to save, to gather what was gathered before.
        model.config.distributed_config = None
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.save_pretrained(temporary)
    fsync_tree(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    fsync_directory(target.parent)


class _ShardingOnCpu(SFTTrainer):
    """Enables FSDP on the CPU, where accelerate refuses it, so that trials use the same code path."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator without sharding, then switch its state to FSDP."""
        parallelism, self.args.parallelism_config = self.args.parallelism_config, None
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        state = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        if parallelism is not None:
            state |= {"parallelism_config": parallelism, "device_mesh": parallelism.get_device_mesh("cpu")}
        AcceleratorState._shared_state.update(state)
        self.is_fsdp_enabled = True


def _trackers(config: Config, rank: int) -> list[AimTracker]:
    if config.tracking.aim_repo is None or rank != 0:
        return []
    experiment = config.tracking.experiment or Path(config.output_dir).name
    return [AimTracker(config.tracking.aim_repo, experiment, config.checkpoint_location)]


def prepare(config_path: str, cache: Path) -> None:
    """Fill a cache as the ranks of this configuration do.

    What is made is what they look for: the tokenizer, the data set and its tokenised rows, and the model's files where
    it has a name. No weight is put into memory, and no GPU is used.
    """
    config = load_config(config_path, environment={})
    if config.data.streaming:
        return
    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.disable_progress_bar()
    options = {name: value for name, value in config.trainer.items() if name not in _OF_RANKS}
    args = training_arguments(config.model_copy(update={"strategy": "ddp", "trainer": options}))
    dataset, held_back = load_training_data(config.data, cache, seed=args.seed)
    model, tokenizer = build(config.model, config.method, dataset, cache, bf16=args.bf16, seed=args.seed, outline=True)
    _Preparing(model=model, args=args, train_dataset=dataset, eval_dataset=held_back, processing_class=tokenizer)
    seal(cache)


class _Preparing(SFTTrainer):
    """Tokenises the data when it is made, as `SFTTrainer` does; cannot train."""

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave a model without weights where it is."""
