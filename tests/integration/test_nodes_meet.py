"""The ranks of nodes meet again after a loss, at the store of the leader; strangers on the network meet nobody."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from infra.ports import free_ports
from integration.support import Run, wait_until
from torch._C._distributed_c10d import TCPStore

LOOP = """
import time, torch
import torch.distributed as dist
from checkpointing import CheckpointManager
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager(model=model, optimizer=optimizer, save_steps=20)
for step in range(manager.resume(), 60):
    dist.all_reduce(torch.ones(1))
    optimizer.step()
    manager.step(step + 1)
    time.sleep(0.05)
manager.close()
"""


@pytest.mark.parametrize(("nnodes", "backend"), [(2, "c10d"), (3, "static")])
def test_ranks_meet_again_after_a_loss_and_run_nothing_that_a_stranger_wrote(
    nnodes: int, backend: str, tmp_path: Path
) -> None:
    """The nodes of torchrun's c10d unpickle what is in its store: a stranger's code ran on both within 6 s."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    port = free_ports(2)[0]
    shared = ["--set", f"checkpoint.location={tmp_path / 'checkpoints'}", "--nproc-per-node", "1"]
    meet = ["--nnodes", str(nnodes), "--rdzv-backend", backend, "--master-addr", "127.0.0.1"]
    nodes = [
        Run(
            tmp_path / f"node-{rank}",
            *(*shared, *meet, "--master-port", str(port), "--local-addr", "127.0.0.1", "--node-rank", str(rank)),
            script=[str(script)],
        ).start()
        for rank in range(nnodes)
    ]
    first = nodes[0]
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> Any:
            return marker.touch, ()

    wait_until(first, lambda: any(event["step"] >= 20 for event in first.events("committed")))
    run_id = first.events("run_started")[0]["run_id"]
    stranger: Any = TCPStore("127.0.0.1", port, is_master=False)
    for attempt in (1, 2, 3):
        name = f"{run_id}-{attempt}"
        for key in (f"torch.rendezvous.{name}", f"{name}/torch.rendezvous.{name}", f"{name}/{name}"):
            stranger.set(key, pickle.dumps(Bomb()))
    os.kill(first.events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert [node.finish() for node in nodes] == [0] * nnodes, "\n".join(node.output for node in nodes)
    assert len(first.events("attempt_started")) == 2 and first.events("committed")[-1]["step"] == 60
    assert not marker.exists()
