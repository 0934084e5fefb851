"""A training that meets with a GPU fault: faulty.py FAULT DEVICE STEP FILE.

It strikes after the step, or before the first for 0; with a file, which it makes, only once. On a device that is not a
GPU, the message of torch or the driver stands for the fault itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from checkpointing import CheckpointManager

fault, on, at, once = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
is_gpu = on.startswith("cuda")
where = on if is_gpu else "cpu"


def strike() -> None:
    if once:
        if Path(once).exists():
            return
        Path(once).touch()
    if fault == "assert":
        if not is_gpu:
            raise RuntimeError("CUDA error: device-side assert triggered")
        torch.nn.functional.embedding(torch.tensor([10], device=on), torch.zeros(2, 2, device=on))
        torch.cuda.synchronize()
    elif fault == "memory":
        if not is_gpu:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")
        torch.empty(1 << 40, dtype=torch.uint8, device=on)
    elif fault == "hang":
        if not is_gpu:
            time.sleep(10_000)
        while True:
            torch.cuda._sleep(1 << 40)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()


model = torch.nn.Linear(64, 64).to(where)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
manager = CheckpointManager("unused", model=model, optimizer=optimizer, snapshot_steps=1, save_steps=5)
start = manager.resume(total_steps=12)
if at == 0:
    strike()
for step in range(start + 1, 13):
    model(torch.randn(8, 64, device=where)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if step == at:
        strike()
    manager.step(step)
manager.close()
