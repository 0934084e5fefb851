"""Prepares the data of the bundled job on a node that joins a running attempt, which would otherwise wait for that.

What is made is what the ranks look for in the node's cache: the tokenizer, the data set and its tokenised rows, and
the model's files where it has a name. No weight is put into memory, and no GPU is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import transformers
from trl import SFTTrainer

from runner.config.load import load_config
from runner.system import processes
from runner.system.cache import seal
from runner.training.job import training_arguments
from runner.training.model import build
from runner.training.rank import become_independent
from runner.training.training_data import load_training_data

# Without `LOCAL_RANK`, which would have accelerate begin a process group.
_ALONE = {"WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
# Options that have no influence on the data, and would set up what only ranks have.
_OF_RANKS = ("deepspeed", "fsdp_config", "tf32", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval")


def run(spec: dict[str, str]) -> None:
    """Prepare in a process of its own; its output goes to a file.

    Args:
        spec: `config` (file), `cache` (folder) and `log` (file).
    """
    become_independent()
    processes.set_name("prepare")
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(_ALONE)
    prepare(spec["config"], Path(spec["cache"]))


def prepare(config_path: str, cache: Path) -> None:
    """Fill a cache as the ranks of this configuration do.

    Args:
        config_path: The resolved configuration of the run.
        cache: Folder of the cache.

    Raises:
        ValueError: The data cannot be used.
        OSError: Data or model cannot be loaded.
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
