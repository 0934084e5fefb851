"""DistributedDataParallel on three ranks and more: a resumed training sums gradients in the same order."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from infra.torchrun import torchrun
from integration.support import RUNNER

PROGRAM = Path(__file__).parent / "ddp_program.py"
_ALWAYS = ("Plain", "Static", "Late", "PowerSgd", "TwoModules")
_SOAK = (
    *("LargeBuckets", "Unused", "Views", "NoSync", "Accumulated", "Evaluated", "Frozen", "OtherOrder"),
    *("StaticOtherOrder", "Mixed", "HalfHook", "Compiled", "ByUnwrapped"),
)
_CASES = [
    *((name, 3) for name in _ALWAYS),
    *(pytest.param(name, 3, marks=pytest.mark.soak) for name in _SOAK),
    *(pytest.param(name, ranks, marks=pytest.mark.soak) for ranks in (1, 2, 4, 8) for name in ("Plain", "PowerSgd")),
]


@pytest.mark.parametrize(("variant", "ranks"), _CASES)
def test_resumed_after_each_of_the_first_steps(variant: str, ranks: int, tmp_path: Path) -> None:
    ended = torchrun(PROGRAM, tmp_path, variant, ranks=ranks)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = ended.printed()
    assert found["equal"], found
    assert "another order" not in ended.stderr


LOOP = """
import hashlib, os, pathlib, random, signal, sys
import torch, torch.distributed as dist
from checkpointing import CheckpointManager
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
kills = dict(json_kills)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(96, 96), torch.nn.LayerNorm(96), torch.nn.GELU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(96, 8))
trained = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
manager = CheckpointManager("checkpoints", model=trained, optimizer=optimizer, save_steps=5, snapshot_steps=1)
for step in range(manager.resume(), 60):
    mark = pathlib.Path(f"killed-{step}")
    if kills.get(step) == rank and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    loss = trained(torch.randn(16, 96, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    manager.step(step + 1)
manager.close()
digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
pathlib.Path(f"digest-{rank}").write_text(digest.hexdigest())
"""


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_an_own_loop_that_is_killed_at_twelve_random_steps(ranks: int, tmp_path: Path) -> None:
    draw = random.Random(ranks)
    kills = {step: draw.randrange(ranks) for step in draw.sample(range(1, 60), 12)}

    def run(name: str, kills: dict[int, int]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(LOOP.replace("json_kills", repr(kills)))
        options = [f"--nproc-per-node={ranks}", "--output-dir=run", "--max-restarts=20"]
        ended = subprocess.run(
            [*RUNNER, "start", *options, "train.py"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=1400,
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        assert len(list(folder.glob("killed-*"))) == len(kills)
        (digest,) = {path.read_text() for path in folder.glob("digest-*")}
        return digest

    assert run("killed", kills) == run("undisturbed", {})
