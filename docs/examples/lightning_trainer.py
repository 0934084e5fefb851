"""A Lightning script made resilient by the marked lines.

Run it, kill it at any moment (`kill -9`), and run it again: it resumes from the newest checkpoint, also in the middle
of an epoch, and the result is bit-identical.
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkpointing.lightning import ResilientCheckpoint  # added


class Model(L.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = (self.layers(x).squeeze(1) - y).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
L.seed_everything(0)
inputs = torch.randn(20_000, 64)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1)), batch_size=512, shuffle=True)
checkpoints = ResilientCheckpoint(f"{folder}/checkpoints", save_steps=10)  # added
trainer = L.Trainer(max_epochs=3, logger=False, default_root_dir=folder, callbacks=[checkpoints])
model = Model()
trainer.fit(model, loader)
Path(folder).mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), f"{folder}/model.pt")
