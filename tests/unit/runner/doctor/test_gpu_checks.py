"""What the doctor says of a sharded model's traffic."""

from __future__ import annotations

import pytest

from runner.config.schema import Config
from runner.doctor.findings import Level
from runner.doctor.gpu_checks import check_mesh
from runner.plan.memory_need import PlannedJob

NVLINK, PCIE = {"NVLink": 28}, {"NVLink": 4, "PCIe and the link between the processors": 24}
ZERO_3 = {"zero_optimization": {"stage": 3}}


def told(
    strategy: str | dict[str, int],
    ranks: int,
    local_ranks: int,
    links: dict[str, int],
    *,
    has_rdma: bool = True,
    on_gpu: bool = True,
) -> list[tuple[Level, str]]:
    config = Config.model_validate(
        {"strategy": strategy, "trainer": {"bf16": True, **({"deepspeed": ZERO_3} if strategy == "deepspeed" else {})}}
    )
    job = PlannedJob.of(config, ranks, local_ranks, on_gpu=on_gpu)
    return [(one.level, one.text) for one in check_mesh(job, 10**9, links, has_rdma=has_rdma)]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_all_nodes", "deepspeed"])
def test_a_sharded_model_on_one_node_goes_by_the_slowest_link(strategy: str) -> None:
    traffic = "each step moves 6.00 GB to and from each rank, within this node over "
    assert told(strategy, 8, 8, NVLINK) == [(Level.OK, traffic + "NVLink")]
    assert told(strategy, 8, 8, PCIE) == [(Level.WARN, traffic + "PCIe and the link between the processors")]


@pytest.mark.parametrize(("strategy", "crosses"), [("fsdp", False), ("fsdp_all_nodes", True), ("deepspeed", True)])
def test_what_crosses_between_nodes_wants_rdma(strategy: str, crosses: bool) -> None:
    found = told(strategy, 16, 8, NVLINK, has_rdma=False)
    assert [level for level, _ in found] == [Level.WARN] * crosses + [Level.OK]
    assert not crosses or found[0][1].endswith("between nodes, and this node has no network card for RDMA")
    assert [level for level, _ in told(strategy, 16, 8, NVLINK)] == [Level.OK]
    # One rank on each node: nothing stays within one.
    assert len(told(strategy, 2, 1, {}, has_rdma=False)) == crosses


def test_nothing_is_said_where_nothing_is_gathered() -> None:
    assert told("ddp", 16, 8, PCIE, has_rdma=False) == []
    assert told("fsdp", 1, 1, {}) == []
    assert told("fsdp", 2, 2, {}, on_gpu=False) == []


def test_a_tensor_parallel_group_wants_the_fastest_links() -> None:
    text = "the 2 ranks of a tensor parallel group wait for each other's activations in every layer, within this node "
    text += "over "
    assert told({"tp": 2}, 8, 8, NVLINK) == [(Level.OK, text + "NVLink")]
    slow = told({"tp": 2, "dp_shard": 4}, 8, 8, PCIE)
    assert slow[0] == (Level.WARN, text + "PCIe and the link between the processors")
    assert "each step moves" in slow[1][1]
    assert "no network card for RDMA" in told({"dp_shard": 16}, 16, 8, NVLINK, has_rdma=False)[0][1]
