"""Training whose checkpoints go to S3, by `CheckpointManager`'s public methods alone; started by `storage.py`.

`steps` times steps with and without saves. `save` makes one large checkpoint and `resume` resumes from it, each in
ranks of torchrun. Each process prints one line "RESULT {json}".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from checkpoint_worker import Model
from common import touch_memory
from torch import nn

from checkpointing import CheckpointManager

TRAINING_CORE = 0


@dataclass(frozen=True)
class Shapes:
    """Of the model that is trained over the slow link, and of the large one that is resumed."""

    vocabulary: int
    width: int
    layers: int
    tokens: int
    large_width: int
    large_layers: int


SHAPES = {
    # 63 MB of weights and AdamW state, 5 s on a link of 100 Mbit/s, with steps of about 0.3 s; and 1.0 GB.
    "full": Shapes(2560, 256, 5, 448, large_width=4096, large_layers=5),
    "tiny": Shapes(1024, 128, 2, 64, large_width=256, large_layers=2),
}


def _move_to(core: int) -> None:
    """Move all threads of this process; its children stay where they are."""
    for thread in Path("/proc/self/task").iterdir():
        # It may have ended since it was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


class SmallRun:
    """A loop like `docs/examples/loop.py`, on a core of its own."""

    def __init__(self, location: str, agent_core: int, shapes: Shapes) -> None:
        torch.manual_seed(0)
        self._shapes = shapes
        self.model = Model(shapes.width, shapes.layers, shapes.vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state_bytes = 3 * sum(parameter.nbytes for parameter in self.model.parameters())
        # The agent starts on this core and stays there.
        _move_to(agent_core)
        self.manager = CheckpointManager(location, model=self.model, optimizer=self.optimizer, snapshot_steps=None)
        self.number = self.manager.resume()
        _move_to(TRAINING_CORE)
        (self.agent,) = psutil.Process().children()

    def step(self, *, saving: bool) -> float:
        """Run a step with the agent running or stopped; returns its seconds."""
        self.agent.send_signal(signal.SIGCONT if saving else signal.SIGSTOP)
        began = time.perf_counter()
        tokens = torch.randint(0, self._shapes.vocabulary, (1, self._shapes.tokens))
        loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        if saving:
            self.manager.step(self.number)
        return time.perf_counter() - began

    def save(self, in_flight_s: float) -> tuple[list[tuple[float, float]], float]:
        """Save, and run pairs of steps meanwhile.

        Args:
            in_flight_s: How long the save is certainly under way.

        Returns:
            Seconds of each pair's steps with the agent running and stopped, and of the whole save.
        """
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


def time_steps(location: str, agent_core: int, num_saves: int, bytes_per_s: float, shapes: Shapes) -> dict[str, Any]:
    """Time steps during saves that a link of this rate cannot have finished."""
    run = SmallRun(location, agent_core, shapes)
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


def large_run(location: str, shapes: Shapes, *, saving: bool, touch_bytes: int) -> dict[str, Any]:
    """Run one rank of the large run up to where its first step can begin; with `saving`, also a step and its save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = shapes.large_width
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(shapes.large_layers)])
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=["steps", "save", "resume"])
    parser.add_argument("location")
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--agent-core", type=int, default=TRAINING_CORE)
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--touch", type=int, default=0, help="bytes of memory to touch before a resume")
    parser.add_argument("--bytes-per-s", type=float, default=1e9, help="of the link")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = SHAPES[options.size]
    if options.method == "steps":
        result = time_steps(options.location, options.agent_core, options.saves, options.bytes_per_s, shapes)
    else:
        saving = options.method == "save"
        result = large_run(options.location, shapes, saving=saving, touch_bytes=options.touch)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
