"""A Lightning job for test_lightning.py: `lightning_job.py FOLDER SIGNAL@STEP OPTION...`; prints what it ends with."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from checkpointing.lightning import ResilientCheckpoint

folder, trouble, options = sys.argv[1], sys.argv[2], set(sys.argv[3:])
number, _, at = trouble.partition("@")
L.seed_everything(1, verbose=False)
x = torch.randn(260, 8)
y = x.sum(1, keepdim=True)


class Job(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = "manual" not in options
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.second = nn.Linear(8, 1) if "manual" in options else None
        self.error = torchmetrics.MeanAbsoluteError()
        self.batches = 0

    def training_step(self, batch: Any, index: int) -> Any:
        output = self.net(batch[0])
        loss = (output - batch[1]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.error(output, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        if self.second is not None:
            losses = (loss, (self.second(batch[0]) - batch[1]).pow(2).mean())
            for one, optimizer in zip(losses, self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(one)
                optimizer.step()
            schedulers: Any = self.lr_schedulers()
            for scheduler in schedulers:
                scheduler.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        data.trained += 1
        if at and self.trainer.global_step == int(at) and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), getattr(signal, number))

    def validation_step(self, batch: Any, index: int) -> None:
        # It draws, as the training that follows does.
        self.log("validation", (self.net(batch[0]) - batch[1]).pow(2).mean() + torch.rand(()) * 0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]

    def configure_model(self) -> None:
        if "fsdp" in options:
            assert self.device_mesh is not None
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.net.parameters(), 1e-2)
        if self.second is not None:
            both = [adam, torch.optim.SGD(self.second.parameters(), 1e-2, momentum=0.9)]
            return both, [torch.optim.lr_scheduler.StepLR(one, 5) for one in both]
        if "plateau" in options:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, factor=0.7)
            return {"optimizer": adam, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}
        step = torch.optim.lr_scheduler.StepLR(adam, 7)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": step, "interval": "step"}}


class Counts(L.Callback):
    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended += 1

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "ended": self.ended, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for one, other in zip(x, y, strict=True):
            yield one + torch.randn(()) * 0.1, other


class Data(L.LightningDataModule):
    trained = 0

    def train_dataloader(self) -> Any:
        if "stream" in options:
            return DataLoader(Stream(), 32)
        return DataLoader(TensorDataset(x, y), 32, shuffle=True, num_workers=2 if "workers" in options else 0)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(x, y), 64)

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trained = state["trained"]


counts, job, data = Counts(), Job(), Data()
callbacks: list[Any] = [counts, ResilientCheckpoint(f"{folder}/checkpoints", save_steps=1, snapshot_steps=None)]
if "early" in options:
    callbacks.append(EarlyStopping("loss_epoch", patience=1, min_delta=1.0))
if "average" in options:
    callbacks.append(EMAWeightAveraging(decay=0.9))
trainer = L.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if "fsdp" in options else "auto",
    accumulate_grad_batches=2 if "accumulate" in options else 1,
    val_check_interval=3 if "validate" in options else 1.0,
    limit_train_batches=7 if "limit" in options else 1.0,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
    callbacks=callbacks,
)
trainer.fit(job, data)
digest = hashlib.sha256()
for value in job.state_dict().values():
    digest.update((value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().tobytes())
if trainer.is_global_zero:
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    steps = (trainer.global_step, trainer.current_epoch, job.batches, data.trained)
    print(json.dumps({"weights": digest.hexdigest(), "steps": steps, "rates": rates, **counts.state_dict()}))
