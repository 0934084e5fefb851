"""Training whose checkpoints go to S3, by `CheckpointManager`'s public methods alone.

`steps` times steps with and without saves. `save` makes one large checkpoint and `resume` resumes from it, each in
ranks of torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from library.measuring import touch_memory
from library.methods import Decoder, loss_of, state_bytes
from library.orders import carry_out
from library.workers import set_affinity
from torch import nn

from checkpointing import CheckpointManager

TRAINING_CORE = 0


class SmallRun:
    """A loop like `docs/examples/loop.py`, on a core of its own."""

    def __init__(self, location: str, agent_core: int, vocabulary: int, width: int, layers: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = Decoder(width, layers, vocabulary)
        self.loss = functools.partial(loss_of, self.model, tokens, vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state_bytes = state_bytes(self.model)
        # The agent starts on this core and stays there.
        set_affinity(os.getpid(), [agent_core])
        self.manager = CheckpointManager(location, model=self.model, optimizer=self.optimizer, snapshot_steps=None)
        self.number = self.manager.resume()
        set_affinity(os.getpid(), [TRAINING_CORE])
        (self.agent,) = psutil.Process().children()

    def step(self, *, saving: bool) -> float:
        """Run a step with the agent running or stopped; returns its seconds."""
        self.agent.send_signal(signal.SIGCONT if saving else signal.SIGSTOP)
        began = time.perf_counter()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        if saving:
            self.manager.step(self.number)
        return time.perf_counter() - began

    def save(self, in_flight_s: float) -> tuple[list[tuple[float, float]], float]:
        """Save; return seconds of pairs of steps meanwhile, with the agent running and stopped, and of the save."""
        self.manager.save(self.number, self.number)
        began = time.monotonic()
        # The snapshot is copied during this step.
        self.step(saving=True)
        pairs: list[tuple[float, float]] = []
        while time.monotonic() < began + in_flight_s:
            step_s = {saving: self.step(saving=saving) for saving in ((True, False), (False, True))[len(pairs) % 2]}
            pairs.append((step_s[True], step_s[False]))
        self.agent.send_signal(signal.SIGCONT)
        self.manager.wait_for_commit()
        return pairs, time.monotonic() - began


def time_steps(location: str, agent_core: int, num_saves: int, bytes_per_s: float, **shape: int) -> dict[str, Any]:
    """Time steps during saves that a link of this rate cannot have finished."""
    run = SmallRun(location, agent_core, **shape)
    try:
        for _ in range(3):
            run.step(saving=True)
        run.save(0.0)  # Moments, arenas and connections are made once.
        saves = [run.save(0.9 * run.state_bytes / bytes_per_s) for _ in range(num_saves)]
        run.manager.close()
    finally:
        with contextlib.suppress(psutil.Error):
            run.agent.send_signal(signal.SIGCONT)
    pairs = [pair for pairs, _ in saves for pair in pairs]
    return {"pairs": pairs, "save_s": [save_s for _, save_s in saves], "state_bytes": run.state_bytes}


def large_run(location: str, touch_bytes: int, width: int, layers: int, *, saving: bool = False) -> dict[str, Any]:
    """Run one rank of the large run up to where its first step can begin; with `saving`, also a step and its save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if touch_bytes and dist.get_rank() == 0:
        touch_memory(touch_bytes)
    dist.barrier()
    manager = CheckpointManager(location, model=model, optimizer=optimizer, save_steps=1)
    # The agent begins to read now.
    step = manager.resume()
    ended = time.monotonic()  # The processes of a machine share this clock.
    if saving:
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    dist.destroy_process_group()
    return {"ended": ended, "step": step}


if __name__ == "__main__":
    torch.set_num_threads(1)
    carry_out({"steps": time_steps, "resume": large_run, "save": functools.partial(large_run, saving=True)})
