"""A training on the GPU under `runner start`, the same bits each time: job.py PARAMETERS STEPS ANSWER_FILE."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
from gpu_proof.stages import make_model

from checkpointing import CheckpointManager

torch.use_deterministic_algorithms(True)
parameters, steps, answer = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
print("free of the GPU before the first use:", *torch.cuda.mem_get_info(), flush=True)
model = make_model("cuda:0", parameters)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
manager = CheckpointManager("unused", model=model, optimizer=optimizer, snapshot_steps=5, save_steps=steps, keep_last=1)
start = manager.resume(total_steps=steps)
for step in range(start + 1, steps + 1):
    torch.manual_seed(step)
    data = torch.randn(2048, next(model.parameters()).shape[1], device="cuda:0", dtype=torch.bfloat16)
    loss = model(data).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step, metrics={"loss": loss.item()})
manager.close()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
answer.write_text(digest.hexdigest())
