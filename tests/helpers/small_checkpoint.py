"""A checkpoint of a small training, on disk or as a snapshot in memory; a loaded one of a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from checkpointing.agent.client import Offered, OfferedSnapshot
from checkpointing.agent.events import Event
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.files.file_images import FileImage, blob_image, pieces
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.safetensors_files import safetensors_image
from checkpointing.files.torch_files import TorchFileLayout, torch_bytes
from checkpointing.format.digest import RunningDigest, digesting
from checkpointing.format.layout import MODEL_NAME, OPTIMIZER_NAME
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.process import rng
from checkpointing.process.device import HostDevice
from checkpointing.storage import LocalStorage


def network() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """A model and its optimizer, after one step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def images(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[FileImage]:
    return [
        safetensors_image(MODEL_NAME, model.state_dict()),
        TorchFileLayout(OPTIMIZER_NAME).image(optimizer.state_dict()),
        blob_image(rng.file_name(0, 1), torch_bytes(rng.state(1))),
    ]


def write_checkpoint(
    folder: Path, step: int, training: tuple[torch.nn.Module, torch.optim.Optimizer], attempt: int = 1, **metrics: float
) -> LocalStorage:
    """Commit the state of a training; returns the storage."""
    storage, window, files = LocalStorage(folder), memoryview(bytearray(1 << 16)), []
    for image in images(*training):
        digest = RunningDigest()
        files.append(StagedFile(image.name, digesting(pieces(image, window, HostDevice()), digest), digest.result))
    commit_snapshot(storage, SnapshotInfo("run", attempt, step, 1, step, metrics), files)
    return storage


def snapshot(step: int, training: tuple[torch.nn.Module, torch.optim.Optimizer], attempt: int = 1) -> OfferedSnapshot:
    """Return the state of a training run as an agent offers it."""
    files, digests = {}, {}
    for image in images(*training):
        digest = RunningDigest()
        window = memoryview(bytearray(1 << 16))
        data = b"".join(bytes(piece) for piece in digesting(pieces(image, window, HostDevice()), digest))
        files[image.name], digests[image.name] = memoryview(bytearray(data)), digest.result()
    return OfferedSnapshot(SnapshotInfo("run", attempt, step, 1, step, {}), files, digests)


STEP, SAMPLES = 20, 80


def point(name: str, data: bytes, step: int = STEP) -> LoadedCheckpoint:
    """Return what a rank holds of a single file, once its digest was checked; every step has four samples."""
    return LoadedCheckpoint(
        f"/runs/checkpoint-{step}",
        step=step,
        world_size=1,
        samples_consumed=step * SAMPLES // STEP,
        files={name: memoryview(bytearray(data))},
        path=None,
        private=True,
    )


class Agent:
    """Replaces a connection to an agent: offers snapshots, and records the calls."""

    def __init__(self, directory: Path, *snapshots: OfferedSnapshot, reachable: bool = True, saving: int = -1) -> None:
        self.directory, self._snapshots, self._reachable = directory, list(snapshots), reachable
        self._saving = saving
        # Of each offer, whether it was to wait until no share is being saved.
        self.waited: list[bool] = []
        self.events: list[dict[str, Any]] = []
        self.discarded: list[int] = []
        self.pruned = 0
        self.run_id, self.attempt = "run", 2

    def offer(self, on_fetch: object = None, *, settled: bool = True) -> Offered:
        self.waited.append(settled)
        return Offered(self._snapshots, self._reachable, -1 if settled else self._saving)

    def announce(self, event: Event) -> None:
        self.events.append(event.to_dict())

    def discard(self, step: int, reason: str, *, damaged: bool = True) -> None:
        self.discarded.append(step)

    def prune(self, retention: object) -> None:
        self.pruned += 1
