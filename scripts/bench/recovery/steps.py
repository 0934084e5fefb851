"""Steps of the default job with and without supervision, in short alternating blocks of one run.

    runner start … recovery_steps.py OUTPUT_FILE NUM_PAIRS SEED

In a block without supervision, the ranks leave out the heartbeat, the flag exchange and the reports. Blocks log at the
same place, and are so short that both of a pair run under the same conditions. The first step of a block is not
counted: it may contain an exchange that the block before has begun. Rank 0 writes one JSON line per pair of blocks with
the seconds of a step in each, and at the end an account of all that supervision does, which is far more exact than the
pairs: the time that the callbacks take of a step in the slowest rank, the processor time of the flag exchange's own
threads, and that of the run's other processes (supervisor, agent, launcher, fork server).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch.distributed as dist
import transformers
from trl import SFTTrainer

from checkpointing.manager.step_protocol import Due
from checkpointing.transformers import resilient
from checkpointing.transformers.callback import StepCallback
from runner.config.load import load_config
from runner.training.job import training_arguments
from runner.training.metrics import MetricsCallback
from runner.training.model import build
from runner.training.training_data import load_training_data

# Each block holds one log entry, in what is counted; the default job logs every five steps.
LOGGING_STEPS = 5
BLOCK_STEPS = 5
WARM_UP_STEPS = 30


def blocks(num_pairs: int, seed: int) -> list[bool]:
    """Return whether each block is supervised: pairs, in either order equally often."""
    orders = [index % 2 == 0 for index in range(num_pairs)]
    random.Random(seed).shuffle(orders)
    return [supervised for first in orders for supervised in (first, not first)]


class Switch:
    """Switches a rank's part of supervision off and on, and measures the time that it takes."""

    def __init__(self, trainer: Any) -> None:
        self._manager, self._report = trainer._manager, trainer._manager.report
        self._end_of_step, self._ask = trainer._manager.end_of_step, trainer._manager._protocol._ask
        self._supervised = False
        self._taken_s, self._num_steps, self._num_exchanges = 0.0, 0, 0
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, (StepCallback, MetricsCallback)):
                for name in ("on_step_begin", "on_step_end", "on_log"):
                    is_report = isinstance(callback, MetricsCallback) and name == "on_log"
                    setattr(callback, name, self._timed(getattr(callback, name), is_report=is_report))
        trainer._manager._protocol._ask = self._counted_ask

    def set(self, supervised: bool) -> None:
        """Switch for the next steps; all ranks follow the same plan, without communication."""
        self._supervised = supervised
        self._manager.end_of_step = self._counted_end_of_step if supervised else self._leave_out
        self._manager.report = self._report if supervised else lambda *_: None

    def account(self) -> dict[str, float]:
        """Return the seconds of a step in the callbacks of the slowest rank, and in the flag exchange's threads."""
        # The processor time of an exchange in all threads; the calling thread's part is in the callbacks' time already.
        began, num_exchanges = time.process_time(), 200
        for _ in range(num_exchanges):
            self._manager._protocol._flag_sync.exchange(lambda: (set(), 1), now=True)
        self._manager._protocol._flag_sync.drain()
        exchange_s = (time.process_time() - began) / num_exchanges
        own = {
            "callbacks_s": self._taken_s / self._num_steps,
            "threads_s": exchange_s * self._num_exchanges / self._num_steps,
        }
        ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        return {name: max(rank[name] for rank in ranks) for name in own}

    def _timed(self, hook: Callable[..., Any], *, is_report: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_report and not self._supervised:
                return None
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                if self._supervised:
                    self._taken_s += time.perf_counter() - began

        return timed

    def _counted_end_of_step(self, step: int) -> Due:
        self._num_steps += 1
        due: Due = self._end_of_step(step)
        return due

    def _counted_ask(self) -> Any:
        self._num_exchanges += 1
        return self._ask()

    def _leave_out(self, step: int) -> Due:
        # Steps are still counted: the interval between exchanges depends on the duration of a step.
        self._manager._protocol._steps_seen += 1
        return Due()


class Others:
    """The processes of this run other than its ranks, and the processor time that they have taken."""

    def __init__(self) -> None:
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        supervisor = next(process for process in psutil.Process().parents() if "start" in process.cmdline())
        everyone = (supervisor, *supervisor.children(recursive=True))
        self._processes = [process for process in everyone if process.pid not in pids]
        self._began, self._cpu_s = time.perf_counter(), self._taken()

    def _taken(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def account(self) -> dict[str, float]:
        """Return the processor time and the wall-clock time since the beginning, in seconds."""
        return {"others_cpu_s": self._taken() - self._cpu_s, "wall_s": time.perf_counter() - self._began}


class Blocks(transformers.TrainerCallback):
    """Runs through the blocks; the last callback, so that its step ends after all others."""

    def __init__(self, trainer: Any, output: Path, num_pairs: int, seed: int) -> None:
        self._trainer, self._plan = trainer, blocks(num_pairs, seed)
        self._file = output.open("w") if dist.get_rank() == 0 else None
        self._seconds: list[float] = []
        self._began = 0.0
        self._switch: Switch | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        index, position = divmod(state.global_step - WARM_UP_STEPS, BLOCK_STEPS)
        if index < 0:
            return
        if self._switch is None:
            self._switch, self._others = Switch(self._trainer), Others()
        if position == 1:
            self._began = time.perf_counter()
        if position != 0:
            return
        if index > 0:
            self._seconds.append((time.perf_counter() - self._began) / (BLOCK_STEPS - 1))
            if index % 2 == 0:
                names = ["supervised" if flag else "plain" for flag in self._plan[index - 2 : index]]
                self._write(dict(zip(names, self._seconds[-2:], strict=True)))
        self._switch.set(self._plan[index] if index < len(self._plan) else True)
        if index == len(self._plan):
            self._write({**self._others.account(), **self._switch.account()})
            control.should_training_stop = True

    def _write(self, entry: dict[str, float]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


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
    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.disable_progress_bar()
    args = training_arguments(config)
    with args.main_process_first(desc="data"):
        dataset, _ = load_training_data(config.data, cache, seed=args.seed)
    model, tokenizer = build(config.model, config.method, dataset, cache, bf16=args.bf16, seed=args.seed)
    reports = MetricsCallback()
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, callbacks=[reports])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer = resilient(trainer, snapshot_steps=None)
    reports.watch(trainer)
    # Every block trains on the same batches. The Trainer takes what it does not know out of one.
    batches = list(itertools.islice(trainer.get_train_dataloader(), BLOCK_STEPS))
    trainer.get_train_dataloader = lambda: map(dict, itertools.cycle(batches))
    trainer.add_callback(Blocks(trainer, output, num_pairs, seed))
    trainer.train()


if __name__ == "__main__":
    main()
