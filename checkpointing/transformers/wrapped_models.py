"""Models in a wrapper: the adapter of a PEFT model, DeepSpeed's engine, and configurations without what is in front."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch

from checkpointing.errors import CheckpointError
from checkpointing.state.adapter import Adapter, Tensors, live_tensors
from checkpointing.state.kinds.zero import is_engine


def adapter_of(model: Any) -> Adapter | None:
    """Return what is saved of a model with an adapter, as PEFT or transformers writes it; None if all is saved."""
    prefix, holder = _adapted(model)
    if holder is None:
        return None
    from peft import get_peft_model_state_dict

    if len(holder.peft_config) != 1:
        raise CheckpointError(f"resilient() saves one adapter; this model has {', '.join(holder.peft_config)}")
    name, added = _active_in(holder), "" if accelerate.utils.is_peft_model(holder) else "base_model.model."

    def select(state: Tensors) -> dict[str, torch.Tensor]:
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        # The default, "auto", would query the hub for the vocabulary's original size.
        found = get_peft_model_state_dict(holder, adapter_name=name, save_embedding_layers=False, state_dict=own)
        return {f"{added}{key}": value for key, value in found.items()}

    saved = {id(tensor) for tensor in select(live_tensors(model)).values()}
    if any(parameter.requires_grad and id(parameter) not in saved for parameter in model.parameters()):
        # Prompts that are computed, or weights unfrozen in addition to the adapter: the whole model is saved.
        return None
    # The base need not be a model of transformers.
    return Adapter(select, getattr(getattr(holder, "config", None), "name_or_path", "") or "")


def _adapted(model: Any) -> tuple[str, Any]:
    """Return the PEFT model, or the model of transformers to which `add_adapter` was applied, and its prefix in names.

    The latter may be in another module (sentence-transformers).
    """
    if accelerate.utils.is_peft_model(model):
        return "", model
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    found = [(f"{name}.".lstrip("."), one) for name, one in modules if getattr(one, "_hf_peft_config_loaded", False)]
    # All is saved of several.
    return found[0] if len(found) == 1 else ("", None)


def _active_in(holder: Any) -> Any:
    """Return the name of the adapter that is trained; a callback may have added others."""
    return holder.active_adapter if accelerate.utils.is_peft_model(holder) else holder.active_adapters()[0]


def tracked_model(trainer: Any) -> Any:
    """Return the engine, once the trainer has made it; otherwise the trainer's model."""
    return trainer.model_wrapped if is_engine(trainer.model_wrapped) else trainer.model


def set_batch_shape(trainer: Any) -> None:
    """Have the engine's configuration follow `args`, which say how a step is cut.

    transformers fills it in when a trainer is made, and another number of ranks, or memory that ran out, may cut the
    same samples in another way.
    """
    if not trainer.is_deepspeed_enabled:
        return
    args, config = trainer.args, trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    config["train_micro_batch_size_per_gpu"] = batch
    config["gradient_accumulation_steps"] = accumulation
    config["train_batch_size"] = batch * accumulation * args.world_size


def skips_bad_steps(trainer: Any) -> bool:
    """Return whether steps without finite gradients are part of training: a loss scale is being searched for.

    DeepSpeed skips them in every precision. Where it does so without a loss scale, nothing would ever change again.
    """
    return trainer.accelerator.scaler is not None or bool(trainer.is_deepspeed_enabled and trainer.args.fp16)


def advance_schedule(trainer: Any) -> None:
    """Advance a schedule of DeepSpeed's own in a step that is skipped, and which the engine does not see."""
    engine = trainer.model_wrapped
    if is_engine(engine) and trainer.accelerator.sync_gradients and engine.lr_scheduler is not None:
        engine.lr_scheduler.step()


def configuration_files(trainer: Any) -> dict[str, bytes]:
    """Return what a checkpoint of a resilient trainer says of its model and tokenizer, as files by name."""
    with tempfile.TemporaryDirectory(dir=trainer._manager.scratch) as folder:
        if trainer._adapter is not None:
            _save_adapter_config(trainer.model, folder)
        else:
            _save_model_config(trainer.model, folder, is_fsdp=trainer.is_fsdp_enabled)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _save_adapter_config(model: Any, folder: str) -> None:
    """Write `adapter_config.json` as `save_pretrained` of PEFT or transformers does."""
    _, holder = _adapted(model)
    config = holder.peft_config[_active_in(holder)]
    if not accelerate.utils.is_peft_model(holder):
        config.save_pretrained(folder)
        _save_generation_config(holder, folder)
        return
    config = copy.copy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.config, "name_or_path", None)
    config.save_pretrained(folder)


def _save_model_config(model: Any, folder: str, *, is_fsdp: bool) -> None:
    config = getattr(model, "config", None)
    if config is not None:
        # FSDP2 has put a class of its own in front of the model's.
        architecture = type(model).__bases__[1] if is_fsdp else type(model)
        config.architectures = [architecture.__name__]
        config.save_pretrained(folder)
    _save_generation_config(model, folder)


def _save_generation_config(model: Any, folder: str) -> None:
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
