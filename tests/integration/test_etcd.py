"""Two nodes whose ranks meet at a real etcd, as `torchrun --rdzv-backend etcd-v2` would have them."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from infra.parts import needs
from infra.ports import free_ports
from integration.support import RUNNER, Run, wait_until

pytestmark = needs("etcd")

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


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The endpoint of a server that speaks version 2 of its protocol."""
    clients, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    command = ["etcd", "--enable-v2", "--data-dir", str(tmp_path / "etcd"), "--initial-cluster", f"default={peers}"]
    urls = ("--listen-client-urls", clients, "--advertise-client-urls", clients)
    own = ("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers)
    with (
        (tmp_path / "etcd.log").open("wb") as log,
        subprocess.Popen([*command, *urls, *own], stdout=log, stderr=log) as server,
    ):
        try:
            wait_for_server(server, clients)
            yield clients.removeprefix("http://")
        finally:
            server.kill()


def wait_for_server(server: subprocess.Popen[bytes], url: str) -> None:
    while True:
        assert server.poll() is None
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if b"true" in answer.read():
                    return
        except OSError:
            pass


def test_ranks_of_two_nodes_meet_at_etcd_again_and_again(etcd: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    port = free_ports(2)[0]
    shared = ["--set", f"checkpoint.location={tmp_path / 'checkpoints'}", "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", etcd, "--master-addr", "127.0.0.1"]
    nodes = [
        Run(
            tmp_path / f"node-{rank}",
            *(*shared, *meet, "--master-port", str(port), "--local-addr", "127.0.0.1", "--node-rank", str(rank)),
            script=[str(script)],
        ).start()
        for rank in (0, 1)
    ]
    first, second = nodes
    wait_until(first, lambda: any(event["step"] >= 20 for event in first.events("committed")))
    os.kill(first.events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert [node.finish() for node in nodes] == [0, 0], first.output + second.output
    assert len(first.events("attempt_started")) == 2 and first.events("committed")[-1]["step"] == 60


@pytest.mark.parametrize("missing", ["--master-addr", "--rdzv-endpoint"])
def test_what_etcd_cannot_tell_must_be_given(missing: str, tmp_path: Path) -> None:
    given = {"--master-addr": "node0", "--rdzv-endpoint": "etcd:2379"}
    options = [part for name, value in given.items() if name != missing for part in (name, value)]
    command = [*RUNNER, "start", "--output-dir", str(tmp_path / "run"), "--nnodes", "2", "--rdzv-backend", "etcd-v2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--rdzv-endpoint, the host and port" in done.stderr, done.stderr
