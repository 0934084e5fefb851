"""The sum over virtual ranks where gradients are on a device, and the process group sends from the host only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from infra.torchrun import torchrun

pytestmark = pytest.mark.device

SCRIPT = """
import torch, torch.distributed as dist
import second_device
second_device.load()
from checkpointing.exact.summation import Exchange, TreeNode, total
from checkpointing.data.dealing import block_of
dist.init_process_group("gloo")
rank, virtual_ranks = dist.get_rank(), 4
make = lambda leaf: torch.randn(9, generator=torch.Generator().manual_seed(leaf))
leaves = {TreeNode(leaf): make(leaf) for leaf in range(virtual_ranks)}
expected = total(leaves, virtual_ranks, torch.add) / virtual_ranks
first, last = block_of(rank, 2, virtual_ranks)
target = (leaves[TreeNode(first)] + leaves[TreeNode(last)]).to(f"sim:{rank}")
exchange = Exchange(rank, 2, virtual_ranks)
exchange.mean(target, [target])
assert torch.equal(target.cpu(), expected), (target.cpu(), expected)
print(f"rank {rank}: equal", flush=True)
"""


def test_ranks_on_devices_have_the_bits_of_the_tree(sim: Any, tmp_path: Path) -> None:
    script = tmp_path / "exchange.py"
    script.write_text(SCRIPT)
    result = torchrun(script, ranks=2)
    assert result.returncode == 0, result.stderr
    assert [result.stdout.count(f"rank {rank}: equal") for rank in (0, 1)] == [1, 1]
