"""A PyTorch loop made resilient by the marked lines.

Run it, kill it at any moment (`kill -9`), and run it again: it resumes from the newest checkpoint, also in the middle
of an epoch, and the result is bit-identical.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkpointing import CheckpointManager  # added

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/loop"
torch.manual_seed(0)
inputs = torch.randn(20_000, 64)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1)), batch_size=512, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
manager = CheckpointManager(f"{folder}/checkpoints", model=model, optimizer=optimizer, save_steps=10)  # added
steps = range(manager.resume(), 300)  # added: was range(300)
for step, (x, y) in zip(steps, manager.batches(loader), strict=False):  # added: was an endless loop over the loader
    loss = (model(x).squeeze(1) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
    manager.step(step + 1)  # added
manager.close()  # added
Path(folder).mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), f"{folder}/model.pt")
