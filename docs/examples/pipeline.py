"""Pipeline parallelism (torch.distributed.pipelining) made resilient by the marked lines.

    torchrun --nproc-per-node 2 pipeline.py FOLDER STEPS

Each rank holds one stage. The checkpoints are of the whole model: they resume on any number of stages, and
`from_pretrained`, or `load_state_dict` of the whole model, reads their `model.safetensors`.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from checkpointing import CheckpointManager  # added

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/pipeline"
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
NUM_LAYERS, WIDTH, MICRO_BATCHES = 6, 32, 4
on_accelerator = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() or torch.device("cpu")
dist.init_process_group()
rank, num_stages = dist.get_rank(), dist.get_world_size()
if on_accelerator:
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

# Every rank makes the whole model, so that all begin with the same weights, and keeps its layers, with their names.
torch.manual_seed(0)
whole = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for n in range(NUM_LAYERS)})
first, last = rank * NUM_LAYERS // num_stages, (rank + 1) * NUM_LAYERS // num_stages


class Layers(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


model = Layers(nn.ModuleDict({str(n): whole[str(n)] for n in range(first, last)})).to(device)
stage = PipelineStage(model, rank, num_stages, device)
schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
manager = CheckpointManager(
    f"{folder}/checkpoints", model=model, optimizer=optimizer, pipeline=True, save_steps=10
)  # added
for step in range(manager.resume(), num_steps):  # added: was range(num_steps)
    samples = torch.Generator().manual_seed(step)
    batch = torch.randn(16, WIDTH, generator=samples).to(device)
    losses: list[torch.Tensor] = []
    if rank == 0 and num_stages > 1:
        schedule.step(batch)
    elif rank == num_stages - 1:
        inputs = (batch,) if num_stages == 1 else ()
        schedule.step(*inputs, target=batch.roll(1, 0), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    if losses and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.6f}", flush=True)
    manager.step(step + 1)  # added
manager.close()  # added
dist.destroy_process_group()
