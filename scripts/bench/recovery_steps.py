"""Steps of the default job with and without supervision, in short alternating blocks of one run.

    runner start … recovery_steps.py OUTPUT_FILE NUM_PAIRS SEED

The real job under the real supervisor. In a block without supervision, the ranks leave out the heartbeat, the
agreement and the reports, and everything of the run that is no rank is stopped (SIGSTOP): supervisor, agent, launcher,
fork server. All blocks train on the same batches. The first step of a block is not counted: what the stopped processes
catch up on falls into it. Rank 0 writes one JSON line per pair of blocks: the seconds of a step in each.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch.distributed as dist
import transformers
from trl import SFTTrainer

from checkpointing.client import SOCKET_ENV
from checkpointing.manager import Due
from checkpointing.transformers import resilient
from runner.config import load_config
from runner.training.callbacks import ProgressCallback
from runner.training.data import load_training_data
from runner.training.events import EventSender
from runner.training.job import training_arguments
from runner.training.model import build

# As the default job logs: each block holds one log entry, in the middle of what is counted.
LOGGING_STEPS = 5
BLOCK_STEPS = 5
WARM_UP_STEPS = 27


def blocks(num_pairs: int, seed: int) -> list[bool]:
    """Whether each block is supervised: pairs, in either order equally often."""
    orders = [index % 2 == 0 for index in range(num_pairs)]
    random.Random(seed).shuffle(orders)
    return [supervised for first in orders for supervised in (first, not first)]


class SupervisedReports(ProgressCallback):
    """The default job's reports, which can be left out."""

    supervised = True

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        if self.supervised:
            super().on_log(*args, **kwargs)


class Switch:
    """Turns supervision of this run off and on; only rank 0 stops processes."""

    def __init__(self, trainer: Any, reports: SupervisedReports) -> None:
        self._manager, self._reports = trainer._manager, reports
        self._end_of_step = trainer._manager.end_of_step
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self._others: list[psutil.Process] = []
        if dist.get_rank() == 0:
            self._others = others(set(pids))

    def set(self, supervised: bool) -> None:
        """For the steps to come; all ranks are at the same step when it returns."""
        dist.barrier()
        self._reports.supervised = supervised
        self._manager.end_of_step = self._end_of_step if supervised else lambda step: Due()
        for process in self._others:
            process.send_signal(signal.SIGCONT if supervised else signal.SIGSTOP)
        dist.barrier()

    def restore(self) -> None:
        """Leave nobody stopped, however this ends."""
        for process in self._others:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def others(ranks: set[int]) -> list[psutil.Process]:
    """Everything of this run that is no rank."""
    supervisor = next(process for process in psutil.Process().parents() if "start" in process.cmdline())
    return [process for process in (supervisor, *supervisor.children(recursive=True)) if process.pid not in ranks]


class Blocks(transformers.TrainerCallback):
    """Goes through the blocks; the last callback, so that its step ends when all others are done."""

    def __init__(self, trainer: Any, reports: SupervisedReports, output: Path, num_pairs: int, seed: int) -> None:
        self._trainer, self._reports = trainer, reports
        self._plan = blocks(num_pairs, seed)
        self._file = output.open("w") if dist.get_rank() == 0 else None
        self._seconds: list[float] = []
        self._began = 0.0
        self.switch: Switch | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        index, position = divmod(state.global_step - WARM_UP_STEPS, BLOCK_STEPS)
        if index < 0:
            return
        if self.switch is None:
            self.switch = Switch(self._trainer, self._reports)
        if position == 1:
            self._began = time.perf_counter()
        if position != 0:
            return
        if index > 0:
            self._seconds.append((time.perf_counter() - self._began) / (BLOCK_STEPS - 1))
            self._note()
        if index < len(self._plan):
            self.switch.set(self._plan[index])
        else:
            self.switch.set(True)
            control.should_training_stop = True

    def _note(self) -> None:
        if self._file is None or len(self._seconds) % 2:
            return
        names = ["supervised" if flag else "plain" for flag in self._plan[len(self._seconds) - 2 :][:2]]
        self._file.write(json.dumps(dict(zip(names, self._seconds[-2:], strict=True))) + "\n")
        self._file.flush()


class SameBatches:
    """The first batches of the job's own data, over and over: every block trains on the same ones."""

    def __init__(self, loader: Any) -> None:
        batches = iter(loader)
        self._batches = [next(batches) for _ in range(BLOCK_STEPS)]

    def __iter__(self) -> Iterator[Any]:
        while True:
            # The Trainer takes what it does not know out of a batch.
            yield from (dict(batch) for batch in self._batches)


def main() -> None:
    output, num_pairs, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    settings = {
        "output_dir": str(output.parent),
        "trainer.logging_steps": LOGGING_STEPS,
        "trainer.max_steps": WARM_UP_STEPS + (2 * num_pairs + 1) * BLOCK_STEPS,
        # Snapshots and commits have a benchmark of their own.
        "trainer.save_strategy": "no",
    }
    config = load_config(None, {}, [(key, value, key) for key, value in settings.items()])
    cache = output.parent / "cache"
    # Where the default job would report: beside the agent's own folder.
    folders = Path(os.environ[SOCKET_ENV]).parents
    events = next(folder / "events.sock" for folder in folders if (folder / "events.sock").exists())

    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.disable_progress_bar()
    args = training_arguments(config)
    with args.main_process_first(desc="data"):
        dataset = load_training_data(config.data.path, config.data.split, cache)
    model, tokenizer = build(config.model, dataset, cache, bf16=args.bf16, seed=args.seed)
    reports = SupervisedReports(EventSender(str(events)))
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, callbacks=[reports])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer = resilient(trainer, snapshot_steps=None)
    batches = SameBatches(trainer.get_train_dataloader())
    trainer.get_train_dataloader = lambda: batches
    callback = Blocks(trainer, reports, output, num_pairs, seed)
    trainer.add_callback(callback)
    try:
        trainer.train()
    finally:
        if callback.switch is not None:
            callback.switch.restore()


if __name__ == "__main__":
    main()
