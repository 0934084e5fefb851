"""A small classifier with Lightning, and its usual ModelCheckpoint."""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

out = sys.argv[1]


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))

    def training_step(self, batch):
        x, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(x), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)}


L.seed_everything(1)
generator = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(96, 16, generator=generator), torch.randint(0, 4, (96,), generator=generator))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
trainer = L.Trainer(
    max_steps=20,
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    default_root_dir=out,
    logger=False,
    enable_progress_bar=False,
)
model = Classifier()
trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
if trainer.is_global_zero:
    Path(out).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), f"{out}/final.pt")
