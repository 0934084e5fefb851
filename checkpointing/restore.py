"""Chooses the checkpoint to go on from, together on all ranks, and reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from checkpointing import rng
from checkpointing.catalog import Catalog
from checkpointing.errors import CheckpointError, InvalidCheckpoint, NoValidCheckpoint
from checkpointing.manifest import Manifest
from checkpointing.storage import Storage

logger = logging.getLogger("checkpointing")

MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
# Every rank's share of the loop's state that Hugging Face does not save.
LOOP_STATE_PREFIX = "loop_state_"

Announce = Callable[[dict[str, Any]], None]


class RestorePoint:
    """A checkpoint whose files have just been verified. Everything is read without running code from it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.step = manifest.step
        self._names = {file.name for file in manifest.files}

    def has(self, name: str) -> bool:
        return name in self._names

    def model_state(self) -> dict[str, torch.Tensor]:
        """The model's state dict on the CPU, aliases of tied weights included."""
        state: dict[str, torch.Tensor] = {}
        with safe_open(self.path / MODEL_NAME, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                state[key] = file.get_tensor(key)
            for alias, owner in (file.metadata() or {}).items():
                if owner in state and alias not in state:
                    state[alias] = state[owner]
        return state

    def torch_object(self, name: str) -> Any:
        """What `torch.save` put into a file."""
        with torch.serialization.safe_globals(rng.SAFE_GLOBALS):
            return torch.load(self.path / name, map_location="cpu", weights_only=True)

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_bytes())


def choose(
    storage: Storage,
    resume: str | int,
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    announce: Announce,
) -> RestorePoint | None:
    """Agree on the checkpoint to resume from; called by all ranks together.

    Rank 0 proposes the newest whole checkpoint; every rank verifies the files that it will read; where any rank finds
    a fault, rank 0 sets that checkpoint aside (it is kept, renamed) and all fall back to the one before.

    Args:
        resume: "auto", "never", or a step.
        group: a gloo group of all ranks, or None for one process.
        announce: told of every checkpoint that is set aside.

    Returns:
        None where training starts from the beginning.

    Raises:
        NoValidCheckpoint: there are checkpoints, but none can be loaded, or not the one asked for.
    """
    while True:
        proposal: list[Any] = [_propose(storage, resume, announce) if rank == 0 else None]
        if group is not None:
            dist.broadcast_object_list(proposal, src=0, group=group)
        step, error = proposal[0]
        if error is not None:
            raise NoValidCheckpoint(error)
        if step is None:
            return None
        point, problem = _verify(storage, step, rank, world_size)
        problems = [problem]
        if group is not None:
            problems = [None] * world_size
            dist.all_gather_object(problems, problem, group=group)
        found = next((text for text in problems if text is not None), None)
        if found is None:
            assert point is not None
            return point
        if isinstance(resume, int):
            raise NoValidCheckpoint(f"--resume {resume}: {found}")
        if rank == 0:
            _set_aside(storage, step, found, announce)


def _propose(storage: Storage, resume: str | int, announce: Announce) -> tuple[int | None, str | None]:
    """Rank 0's part: the step to try, or None to start afresh, or why neither is possible."""
    if resume == "never":
        return None, None
    if isinstance(resume, int):
        try:
            storage.read_manifest(resume)
        except InvalidCheckpoint as error:
            available = ", ".join(str(step) for step in Catalog(storage).committed_steps()) or "none"
            return None, f"--resume {resume}: {error}; committed steps: {available}"
        return resume, None
    for entry in Catalog(storage).entries():
        if entry.manifest is not None:
            return entry.step, None
        _set_aside(storage, entry.step, f"{storage.local_path(entry.step)}: {entry.problem}", announce)
    kept = storage.set_aside_names()
    if kept:
        return None, (
            f"{storage.location} holds checkpoints but none is valid ({', '.join(kept)}). Nothing was deleted: repair "
            "one, or move them away to start from step 0."
        )
    return None, None


def _verify(storage: Storage, step: int, rank: int, world_size: int) -> tuple[RestorePoint | None, str | None]:
    try:
        manifest = storage.read_manifest(step)
        own = {rng.file_name(rank, world_size), f"{LOOP_STATE_PREFIX}{rank}.json"}
        names = frozenset(
            file.name
            for file in manifest.files
            if file.name in own or not file.name.startswith(("rng_state", LOOP_STATE_PREFIX))
        )
        Catalog(storage).verify(step, only=names)
        return RestorePoint(storage.local_path(step), manifest), None
    except CheckpointError as error:
        return None, str(error)


def _set_aside(storage: Storage, step: int, problem: str, announce: Announce) -> None:
    kept = storage.set_aside(step)
    logger.warning("checkpoint-%d is not used: %s. It is kept as %s", step, problem, kept)
    announce({"event": "checkpoint_set_aside", "step": step, "reason": problem, "kept_as": kept})
