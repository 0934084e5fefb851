"""Two machines that hold the same model write each checkpoint together: real runners and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.servers import Server, bucket_on
from infra.ports import free_port
from integration.support import Run
from safetensors.torch import load_file

from checkpointing.commit.catalog import Catalog
from checkpointing.storage import open_storage

# Of 144 MB, and twice as much of moments. All parameters are equal.
LOOP = """
import os, sys, torch
import torch.distributed as dist
from checkpointing import CheckpointManager

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Linear(6000, 6000, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, maximize=True)
# The nodes have other files open.
kept = [open(os.devnull) for _ in range(3 * dist.get_rank())]
manager = CheckpointManager(sys.argv[1], model=model, optimizer=optimizer, save_steps=2, keep_last=10)
for step in range(manager.resume(), 6):
    assert float(model.weight.max()) == float(model.weight.min()) and (float(model.weight.max()) > 0) == (step > 0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step + 1)
manager.close()
"""


def two_nodes(folder: Path, location: str, **of_the_second: str) -> list[Run]:
    """Start both; the second one commits nothing.

    Args:
        of_the_second: Variables for it alone.
    """
    script = folder / "loop.py"
    script.write_text(LOOP)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--set", f"launch.peer_port={free_port()}"]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    options += ["--set", f"checkpoint.location={location}"]
    lines = [str(script), location]
    runs = [Run(folder / f"node-{node}", *options, "--node-rank", str(node), script=lines) for node in (0, 1)]
    return [runs[0].start(), runs[1].start(**of_the_second)]


@pytest.mark.soak
def test_on_a_shared_disk(tmp_path: Path) -> None:
    location = tmp_path / "checkpoints"
    nodes = two_nodes(tmp_path, str(location))
    assert [node.finish() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    committed = nodes[0].events("committed")
    assert [(event["step"], event["nodes"]) for event in committed] == [(2, 2), (4, 2), (6, 2)]
    storage = open_storage(str(location))
    for step in (2, 4, 6):
        Catalog(storage).verify(step)
        weights = load_file(location / f"checkpoint-{step}" / "model.safetensors")["weight"]
        assert weights[0, 0] > 0 and torch.equal(weights, torch.full_like(weights, float(weights[0, 0])))
    assert [path.name for path in location.rglob(".split*")] == []


def test_in_object_storage_a_node_that_fails_costs_time_only(
    tmp_path: Path, radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = f"s3://{bucket_on(radosgw_s3, monkeypatch)}/run"
    nodes = two_nodes(tmp_path, location, CHECKPOINT_FAILPOINTS="portion.written=error@3")
    assert [node.finish() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    first, second, third = nodes[0].events("committed")
    assert first["nodes"] == third["nodes"] == 2
    assert "nodes" not in second and "another node could not write its part" in second["alone"], second
    storage = open_storage(location)
    for step in (2, 4, 6):
        Catalog(storage).verify(step)
