"""The documented example of pipeline parallelism: killed, resumed in the same bits, and resumed on other stages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from infra.torchrun import torchrun
from safetensors.torch import load_file

from checkpointing.commit.export import export_checkpoint
from checkpointing.storage import LocalStorage

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "pipeline.py"


def command(script: Path, folder: Path, stages: int, steps: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}"]
    return [*torchrun, str(script), str(folder), str(steps)]


def train(folder: Path, stages: int, steps: int) -> dict[str, torch.Tensor]:
    done = torchrun(EXAMPLE, folder, steps, ranks=stages)
    assert done.returncode == 0, done.stderr[-3000:]
    return state(folder, steps)


def state(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Weights by name, and moments by number and name."""
    checkpoint = folder / "checkpoints" / f"checkpoint-{steps}"
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    weights: dict[str, torch.Tensor] = load_file(checkpoint / "model.safetensors")
    found = {f"{number}.{key}": value for number, values in moments.items() for key, value in values.items()}
    return weights | found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_pipeline_resumes_in_the_same_bits_and_on_other_stages(tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    expected = train(calm, 2, 60)
    # 6 layers: weights, biases, and for each of them two moments and a count.
    assert len(expected) == 12 + 12 * 3
    held = {**os.environ, "CHECKPOINT_FAILPOINTS": "training.step=hang@45"}
    # On a busy machine its 45 steps may end while snapshots of the first ones are digested, and no save gets an arena.
    # Without snapshots in between, the first save gets one.
    script = tmp_path / "pipeline.py"
    script.write_text(EXAMPLE.read_text().replace("save_steps=10", "save_steps=10, snapshot_steps=None"))
    ranks = subprocess.Popen(command(script, killed, 2, 60), env=held)
    try:
        while not list(killed.glob("checkpoints/checkpoint-*/manifest.json")):
            assert ranks.poll() is None
            time.sleep(0.05)
    finally:
        # Without a supervisor, ranks outlive torchrun.
        for process in [*psutil.Process(ranks.pid).children(recursive=True), psutil.Process(ranks.pid)]:
            process.kill()
        ranks.wait()
    assert equal(train(killed, 2, 60), expected)
    # The same samples through three stages, and through one: these layers compute the same bits wherever they are.
    longer = train(calm, 2, 70)
    assert equal(train(killed, 3, 70), longer)
    longest = train(calm, 2, 80)
    assert equal(train(killed, 1, 80), longest)


# Two stages on each rank; what is saved has the layers of both, and each stage its own of them.
STAGES = """
all_stages = 2 * num_stages
mine = {c: range(c * NUM_LAYERS // all_stages, (c + 1) * NUM_LAYERS // all_stages) for c in (rank, rank + num_stages)}
model = Layers(nn.ModuleDict({str(n): whole[str(n)] for numbers in mine.values() for n in numbers})).to(device)
stages = [
    PipelineStage(Layers(nn.ModuleDict({str(n): model.layers[str(n)] for n in numbers})), c, all_stages, device)
    for c, numbers in mine.items()
]
schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
"""


@pytest.mark.soak
def test_an_interleaved_schedule_is_resumed_by_another_one(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("ScheduleGPipe\n", "ScheduleInterleaved1F1B\n")
    before, rest = text.split("model = Layers(")
    script = tmp_path / "interleaved.py"
    script.write_text(before + STAGES + rest[rest.index("optimizer = ") :])
    folder = tmp_path / "interleaved"
    assert torchrun(script, folder, 30, ranks=2).returncode == 0
    expected, found = train(tmp_path / "plain", 2, 30), state(folder, 30)
    # The schedules may add gradients up in another order; another layer's would be far away.
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    expected, found = train(tmp_path / "plain", 2, 40), train(folder, 1, 40)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.soak
def test_stages_on_machines_that_hold_no_whole_model(tmp_path: Path) -> None:
    expected = train(tmp_path / "one", 2, 30)
    folder = tmp_path / "two"
    assert torchrun(EXAMPLE, folder, 30, ranks=1, nodes=2).returncode == 0
    assert not (folder / "checkpoints" / "checkpoint-30" / "model.safetensors").exists()
    exported = tmp_path / "exported" / "checkpoints" / "checkpoint-30"
    exported.parent.mkdir(parents=True)
    export_checkpoint(LocalStorage(folder / "checkpoints"), 30, exported)
    assert equal(state(tmp_path / "exported", 30), expected)
    assert equal(train(folder, 2, 40), train(tmp_path / "one", 2, 40))


# Two stages, each on two ranks; what is each rank's own is not what the first rank has.
OWN = """
import sys
import torch, torch.distributed as dist
from torch import nn
from checkpointing import CheckpointManager

dist.init_process_group("gloo")
rank, stage = dist.get_rank(), dist.get_rank() // 2
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, x):
        self.seen += 1 + rank
        return self.norm(self.linear(x))

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


torch.manual_seed(stage)
model = nn.ModuleDict({str(stage): Layer()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + stage), weight_decay=0.1 * stage)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 + stage)
manager = CheckpointManager(
    sys.argv[1], model=model, optimizer=optimizer, scheduler=scheduler, pipeline=True, save_steps=4, snapshot_steps=None
)
for step in range(manager.resume(), int(sys.argv[2])):
    # The ranks of a stage have different samples, and so other running statistics.
    torch.manual_seed(10 * step + rank)
    model[str(stage)](torch.randn(8, 4)).pow(3).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=pairs[stage])
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    manager.step(step + 1)
manager.close()
state = (model[str(stage)].seen, scheduler.state_dict(), optimizer.state_dict()["param_groups"])
tensors = {name: value.tolist() for name, value in model.state_dict().items() if torch.is_tensor(value)}
sys.stdout.write(f"OWN {rank} {state} {tensors}\\n")
dist.destroy_process_group()
"""


def test_what_each_rank_of_a_pipeline_has_of_its_own_is_kept(tmp_path: Path) -> None:
    """Options, schedule, counters, running statistics: all had the first rank's, or there was no checkpoint."""
    script = tmp_path / "own.py"
    script.write_text(OWN)

    def ends(folder: str, *steps: int) -> list[str]:
        for number in steps:
            done = torchrun(script, tmp_path / folder, number, ranks=4)
            assert done.returncode == 0, done.stderr[-3000:]
        return sorted(line for line in done.stdout.splitlines() if line.startswith("OWN"))

    calm = ends("calm", 8)
    assert len(calm) == 4 and len({line.partition(" ")[2] for line in calm}) == 4
    assert ends("resumed", 4, 8) == calm
