"""The job whose resumes are spoiled: a small loop that keeps something of each sort, and what can be left out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from checkpointing import CheckpointManager
from checkpointing.agent.events import StepsRepeated
from checkpointing.errors import CheckpointError
from checkpointing.manager.data_positions import DataPositions
from checkpointing.manager.reporter import Reporter
from checkpointing.manager.restoring import Restoring
from checkpointing.process import rng

SAVE_STEPS = 5
REFUSED = "refused"
WIDTH = 24


class Average:
    """A running mean that weighs the loss; in `states`."""

    def __init__(self) -> None:
        self.value, self.count = 1.0, 0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.value = 0.9 * self.value + 0.1 * float(loss.detach())
        return loss / self.value

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Job:
    """One training, made from a seed."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        kinds = random.Random(seed)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH)]
        self.model = torch.nn.Sequential(*layers)
        make = kinds.choice([torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam])
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        schedule = kinds.choice(["cosine", "lambda"])
        self.scheduler: Any = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
            if schedule == "cosine"
            else torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.97**epoch)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
        self.average = Average()
        data = torch.randn(16 * kinds.randint(2, 4), WIDTH)
        workers = kinds.choice([0, 0, 0, 1])
        rows: Any = data
        self.loader: Any = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, num_workers=workers)

    def manager(self, folder: Path) -> CheckpointManager:
        return CheckpointManager(
            str(folder),
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            states={"average": self.average},
            save_steps=SAVE_STEPS,
            snapshot_steps=None,
        )

    def train(self, manager: CheckpointManager, end: int) -> None:
        """Train from where the manager resumes to a step."""
        for step, batch in zip(range(manager.resume(), end), manager.batches(self.loader), strict=False):
            batch = batch + 0.1 * torch.randn_like(batch) + float(np.random.normal())
            self.optimizer.zero_grad()
            loss = self.average(self.model(batch).square().mean()) * (1 + 0.1 * random.random())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            manager.step(step + 1, metrics={"loss": loss.item()})


Spoil = Callable[[Job, random.Random], Any]


def _keeps(name: str) -> Spoil:
    """Leave out one of the host's generators."""

    def spoil(job: Job, draw: random.Random) -> Any:
        set_all = rng.set_host_state

        def set_others(states: dict[str, Any]) -> None:
            set_all(states | {name: rng.host_state()[name]})

        return mock.patch.object(rng, "set_host_state", set_others)

    return spoil


def _after(change: Callable[[Job, random.Random], None]) -> Spoil:
    """Change something right after everything was restored."""

    def spoil(job: Job, draw: random.Random) -> Any:
        restore = Restoring.restore

        def restored(self: Restoring, point: Any) -> None:
            restore(self, point)
            change(job, draw)

        return mock.patch.object(Restoring, "restore", restored)

    return spoil


def _moment(job: Job, draw: random.Random) -> None:
    state = draw.choice(list(job.optimizer.state.values()))
    name = draw.choice([name for name, value in state.items() if torch.is_tensor(value)])
    state[name].fill_(1.0 if name == "mu_product" else 0.0)


def _weight(job: Job, draw: random.Random) -> None:
    parameter = draw.choice(list(job.model.parameters()))
    with torch.no_grad():
        parameter.copy_(torch.empty_like(parameter).uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(1)))


def _scheduler(job: Job, draw: random.Random) -> None:
    vars(job.scheduler).update(last_epoch=1, _step_count=1)


# By what is left out: how, and what a report may name as the cause.
FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "generator of torch": (_keeps("cpu"), {"torch", REFUSED}),
    "generator of numpy": (_keeps("numpy"), {"numpy"}),
    "generator of Python": (_keeps("python"), {"python"}),
    "position in the data": (
        lambda job, draw: mock.patch.object(DataPositions, "restore", lambda *_: None),
        {"batch", REFUSED},
    ),
    "a weight": (_after(_weight), {"loss"}),
    "a moment": (_after(_moment), {"parameters", "gradient_norm"}),
    "the scheduler": (_after(_scheduler), {"learning_rate"}),
    "the scaler": (
        _after(lambda job, draw: job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": 2.0})),
        {"loss_scale"},
    ),
    "an attribute": (_after(lambda job, draw: job.average.__init__()), {"loss"}),  # type: ignore[misc]
}


def compute_history(folder: Path, seed: int, end: int) -> None:
    """Train, and end as a crash would, with steps after the last checkpoint."""
    job = Job(seed)
    manager = job.manager(folder)
    job.train(manager, end)
    manager.wait_for_commit()
    os._exit(0)


def resume(folder: Path, seed: int, end: int, fault: str | None, result: Path) -> None:
    """Resume, with something left out; write what the comparison has said."""
    job, draw = Job(seed), random.Random(f"{seed}/{fault}/{result.name}")
    events: list[StepsRepeated] = []
    spoiled = FAULTS[fault][0](job, draw) if fault is not None else mock.patch.dict({})
    # What a resume tells its user, a thousand times.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, spoiled, mock.patch.object(Reporter, "steps_repeated", lambda _, event: events.append(event)):
        manager = job.manager(folder)
        try:
            job.train(manager, end + 2)
            manager.close()
        except CheckpointError:
            # An order of samples that is another one is refused before any step is.
            result.write_text(json.dumps([{"first": 1, "last": 0, "differs": [REFUSED]}]))
            os._exit(0)
    found = [{"first": one.first, "last": one.last, "differs": one.differs} for one in events]
    result.write_text(json.dumps(found))
    os._exit(0)
