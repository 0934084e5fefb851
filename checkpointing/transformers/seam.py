"""Every private name of transformers, accelerate and TRL that is used here."""

from __future__ import annotations

import sys
from typing import Any

from checkpointing.host.private_names import PrivateAttribute, PrivateMethod, Seam

_TRAINER = "transformers:Trainer"
_INSTEAD = "use CheckpointManager in your own loop"


def _method(name: str, *arguments: str) -> PrivateMethod:
    return PrivateMethod(_TRAINER, name, arguments)


TRANSFORMERS = Seam(
    "transformers",
    "5.3.0",
    "5.23.0",
    (
        # The loop, in its parts.
        _method("_prepare_for_training", "max_steps", "train_dataloader", "resume_from_checkpoint"),
        _method(
            "_init_training_state",
            *("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial"),
        ),
        _method(
            "_run_epoch",
            *("model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
            *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
            "steps_trained_in_current_epoch",
        ),
        _method("get_batch_samples", "epoch_iterator", "num_batches", "device"),
        _method("training_step", "model", "inputs", "num_items_in_batch"),
        _method("compute_loss", "model", "inputs", "return_outputs", "num_items_in_batch"),
        _method(
            "_maybe_log_save_evaluate",
            *("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
            "learning_rate",
        ),
        _method("_finalize_training", "trial", "num_train_samples", "start_time"),
        _method("_prepare_inputs", "inputs"),
        _method("_track_num_input_tokens", "inputs"),
        # What is saved, and what is restored.
        _method("_get_output_dir", "trial"),
        _method("_save_checkpoint", "model", "trial"),
        _method("_save", "output_dir", "state_dict"),
        _method("_save_optimizer_and_scheduler", "output_dir"),
        _method("_save_scaler", "output_dir"),
        _method("_save_rng_state", "output_dir"),
        _method("_push_from_checkpoint", "checkpoint_folder"),
        _method("_load_callback_state"),
        _method("_load_from_checkpoint", "resume_from_checkpoint", "model"),
        _method("_load_optimizer_and_scheduler", "checkpoint"),
        _method("_load_scaler", "checkpoint"),
        _method("_load_rng_state", "checkpoint"),
        # Figures that a logged loss is the mean of.
        PrivateAttribute(_TRAINER, "_tr_loss"),
        PrivateAttribute(_TRAINER, "_total_loss_scalar"),
        PrivateAttribute(_TRAINER, "_globalstep_last_logged"),
        PrivateAttribute(_TRAINER, "_train_batch_size"),
        # Whether `add_adapter` was applied to a model.
        PrivateAttribute("transformers:PreTrainedModel", "_hf_peft_config_loaded"),
        # Replaced in its module: how batches are skipped, and losses are gathered.
        PrivateAttribute("transformers.trainer", "skip_first_batches"),
        PrivateAttribute("transformers.trainer", "nested_gather"),
    ),
    _INSTEAD,
)
ACCELERATE = Seam(
    "accelerate",
    "1.11.0",
    "1.15.0",
    (
        PrivateAttribute("accelerate.data_loader:BatchSamplerShard", "batch_sampler"),
        PrivateAttribute("accelerate:Accelerator", "optimizer_step_was_skipped"),
    ),
    _INSTEAD,
)
# What trainers of TRL log, and the samples that those which generate have in store.
TRL = Seam(
    "trl",
    "0.29.0",
    "1.16.0",
    (
        PrivateAttribute("trl:SFTTrainer", "_metrics"),
        PrivateAttribute("trl:SFTTrainer", "_total_train_tokens"),
        PrivateAttribute("trl:GRPOTrainer", "_buffered_inputs"),
        PrivateAttribute("trl:GRPOTrainer", "_step"),
    ),
    _INSTEAD,
)


def check_libraries(trainer: Any) -> None:
    """Check the private names that a trainer's training needs (CheckpointError where a library has changed one)."""
    TRANSFORMERS.check()
    ACCELERATE.check()
    # Only those of trainers that are used: their modules are slow to import.
    kinds = {f"trl:{kind.__name__}" for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")}
    if "trl" in sys.modules:
        TRL.check(name for name in TRL.names if name.owner in kinds)
