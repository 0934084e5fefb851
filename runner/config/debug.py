"""`runner start --debug`: a scaled-down job with verbose logging, which fails within a minute if it fails at all."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from runner.config.schema import DEFAULT_CONFIG, Config, LaunchConfig

_MAX_ROWS = 200
_MAX_STEPS = 20
_SAVE_STEPS = 5
_MAX_LENGTH = 128
_VALIDATION_SHARE = 0.05
# Logging that shows where a collective stalls. Variables that the user has set take precedence.
_ENVIRONMENT = {
    "NCCL_DEBUG": "INFO",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}


def for_debugging(config: Config, num_gpus: int) -> Config:
    """Return a scaled-down copy of a job: one node, two ranks, a small model, few rows and steps, blocking saves.

    Its folder is next to the run's; it neither reads nor writes the run's checkpoints.
    """
    small = config.model_copy(deep=True)
    small.output_dir = f"{config.output_dir.rstrip('/')}-debug"
    small.checkpoint.location = small.checkpoint.local_tier = None
    # Without memory for a snapshot, every save blocks training until it is written.
    small.checkpoint.memory_limit = 0
    small.checkpoint.snapshot_steps = small.checkpoint.save_steps = small.checkpoint.save_minutes = None
    small.launch = LaunchConfig(nproc_per_node=min(2, num_gpus or 2), cold=config.launch.cold)
    small.restart.max_restarts = 0
    small.tracking.aim_repo = None
    small.monitoring.port = small.notify.url = None
    bundled = Config.model_validate(yaml.safe_load(DEFAULT_CONFIG.read_text(encoding="utf-8")))
    small.model = bundled.model
    small.data.max_rows = min(config.data.max_rows or _MAX_ROWS, _MAX_ROWS)
    if config.data.validation_share is not None:
        # A small share of so few rows could be none.
        small.data.validation_share = max(config.data.validation_share, _VALIDATION_SHARE)
    steps = int(config.trainer.get("max_steps", 0))
    length = min(int(config.trainer.get("max_length") or _MAX_LENGTH), _MAX_LENGTH)
    small.trainer |= {
        "max_steps": min(steps, _MAX_STEPS) if steps > 0 else _MAX_STEPS,
        "per_device_train_batch_size": min(int(config.trainer.get("per_device_train_batch_size", 4)), 4),
        "gradient_accumulation_steps": min(int(config.trainer.get("gradient_accumulation_steps", 1)), 2),
        "save_strategy": "steps",
        "save_steps": _SAVE_STEPS,
        "logging_steps": 1,
        "max_length": length if length > 0 else _MAX_LENGTH,
        "report_to": "none",
    }
    return small


def debugging_environment(environment: Mapping[str, str], *, on_gpu: bool) -> dict[str, str]:
    """Return the variables to set for the ranks; those that are set already take precedence."""
    # With DETAIL, torch 2.13 crashes (segmentation fault) when DDP is created over gloo.
    wanted = {**_ENVIRONMENT, "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if on_gpu else "INFO"}
    return {name: value for name, value in wanted.items() if name not in environment}
