"""The peers' job in `recovery.py`: the default job as a plain `SFTTrainer` script that resumes in the usual way.

    torchrun --standalone --nproc-per-node 2 recovery_peer.py FOLDER KEY=VALUE...

Model, tokenizer, data and options are the default job's. This project's code neither saves nor resumes. Each rank
appends its start, and rank 0 every finished step, to `FOLDER/journal.jsonl`, in the format of the runner's journal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import datasets
import transformers
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from checkpointing.agent.events import Log
from runner.config.load import load_config, parse_setting
from runner.journal.events import AttemptStarted, RankStarted
from runner.journal.journal import Journal, SteadyClock
from runner.journal.run_directory import RunDirectory
from runner.training.model import build
from runner.training.training_data import load_training_data


class NoteSteps(transformers.TrainerCallback):
    """Records what the default job reports to its supervisor, at the same place in the Trainer's loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            self._journal.append(Log(step=state.global_step, loss=logs["loss"]), os.getpid())


def main() -> None:
    directory = RunDirectory(sys.argv[1])
    directory.create()
    journal = Journal(directory.journal, SteadyClock())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The process id stands for the attempt: it differs between process groups.
    journal.append(RankStarted(rank=rank, pid=os.getpid()), os.getpid())
    if rank == 0:
        nnodes = world_size // int(os.environ["LOCAL_WORLD_SIZE"])
        journal.append(AttemptStarted(nnodes=nnodes), os.getpid())

    settings = [parse_setting(text) for text in sys.argv[2:]]
    config = load_config(None, {}, [*settings, ("output_dir", str(directory.root), "FOLDER")])
    options = dict(config.trainer)
    options["learning_rate"] *= world_size
    checkpoints = config.checkpoint_location
    args = SFTConfig(
        checkpoints,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    datasets.utils.logging.disable_progress_bar()
    with args.main_process_first():
        dataset, _ = load_training_data(config.data, directory.cache, seed=args.seed)
    model, tokenizer = build(config.model, config.method, dataset, directory.cache, bf16=False, seed=args.seed)
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=dataset, processing_class=tokenizer, callbacks=[NoteSteps(journal)]
    )
    last = get_last_checkpoint(checkpoints) if Path(checkpoints).is_dir() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
