"""One training run of one checkpointing method, in a process of its own.

Measures seconds of the whole loop, blocked by each save, and until each save was durable, as far as it is known here.
Needs torch and what the method itself needs, so that a peer can have its own environment.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from library.methods import Dcp, Decoder, Method, Ours, ProtectedDcp, loss_of, state_bytes
from library.orders import carry_out

VOCABULARY = 12288


class HuggingFace(Method):
    """The save of Hugging Face's `Trainer`, by its own code; it does not call fsync."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            str(self.folder), use_cpu=True, report_to="none", save_total_limit=2, save_strategy="steps", save_steps=1
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.trainer = Trainer(model=self.model, args=arguments, optimizers=(self.optimizer, scheduler))

    def save(self, step: int) -> None:
        self.trainer.state.global_step = step
        self.trainer._save_checkpoint(self.model, trial=None)
        self.note_durable(step)


class DLRover(Method):
    """DLRover's Flash Checkpoint: the trainer copies into shared memory, and an agent process writes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
        os.environ.update(GROUP_WORLD_SIZE="1", NODE_RANK="0")
        # Its sockets in /tmp have this name; it would take those of a killed run for its own.
        os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}"
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
        from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine, start_saver_process

        # Version 0.6.1 loses its first message and gives up if the saver starts slowly, as on a single core.
        CheckpointEngine.saver_proc = start_saver_process()
        time.sleep(2)
        self.kind = StorageType.DISK
        self.checkpointer = DdpCheckpointer(str(self.folder))
        self.tracker = self.folder / "dlrover_latest.txt"
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(0.02)
            for step in sorted(self.began.keys() - self.durable.keys()):
                if self.tracker.exists() and self.tracker.read_text().strip() == str(step):
                    self.note_durable(step)

    def save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.checkpointer.save_checkpoint(step, state, str(self.folder / f"{step}.pt"), storage_type=self.kind)

    def finish(self) -> None:
        deadline = time.time() + 60
        while self.began.keys() - self.durable.keys() and time.time() < deadline:
            time.sleep(0.05)


METHODS: dict[str, Callable[..., Method]] = {
    "none": Method,
    "hf": HuggingFace,
    "dcp-thread": Dcp,
    "dcp-process": functools.partial(Dcp, process=True),
    "dcp-shm": functools.partial(Dcp, process=True, shared_memory=True),
    "dcp-shm-async": functools.partial(Dcp, process=True, shared_memory=True, async_staging=True),
    "dcp-protected": ProtectedDcp,
    "dlrover": DLRover,
    "ours": Ours,
}


def train(
    method: str,
    folder: str,
    width: int,
    layers: int,
    tokens: int,
    steps: int,
    save_every: int = 0,
    finish: bool = True,
) -> None:
    """Train, with saves every so many steps (0: none); `finish` waits for the last save."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(width, layers, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saver = METHODS[method](model, optimizer, folder)

    step_times: list[float] = []

    def train_step() -> None:
        loss = loss_of(model, tokens, VOCABULARY)
        optimizer.zero_grad()
        loss.backward()
        saver.timed_wait()
        optimizer.step()

    began = time.perf_counter()
    start = saver.resume()
    resume_s = time.perf_counter() - began
    # The loop starts when the driver has sent a line.
    print("READY", flush=True)
    sys.stdin.readline()
    train_step()  # Allocates gradients and moments.
    began = time.perf_counter()
    for step in range(start + 1, start + steps + 1):
        step_began = time.perf_counter()
        train_step()
        saver.after_step(step)
        if save_every and step % save_every == 0:
            saver.timed_save(step)
        step_times.append(time.perf_counter() - step_began)
    total = time.perf_counter() - began
    if finish:
        saver.finish()
    result = {
        "start": start,
        "resume_s": resume_s,
        "total_s": total,
        "blocked_s": saver.blocked,
        "durable_s": list(saver.durable.values()),
        "began_at": list(saver.began.items()),
        "step_s": step_times,
        "state_bytes": state_bytes(model),
    }
    print("RESULT " + json.dumps(result), flush=True)
    # An orderly exit would wait for threads and processes that peers leave; the driver ends them.
    os._exit(0)


if __name__ == "__main__":
    carry_out({"train": train})
