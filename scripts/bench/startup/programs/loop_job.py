"""A bare loop that says when its first step has ended."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and dist.get_rank() == 0:
        Path(os.environ["FIRST_STEP"]).write_text(str(time.time()))
dist.destroy_process_group()
