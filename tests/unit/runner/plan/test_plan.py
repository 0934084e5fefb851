"""A plan from stated and measured figures, without a model, a GPU or a measurement."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpointing.errors import CheckpointError
from checkpointing.storage import LocalStorage
from checkpointing.storage.rates import Rates
from runner.config.schema import Config
from runner.errors import UsageError
from runner.journal.ledger import NOT_RUNNING
from runner.plan import advice
from runner.plan import plan as module
from runner.plan.memory_need import ModelShape
from runner.plan.plan import Assumptions, Plan, make_plan, render
from runner.plan.simulate.scenario import GPU_MTTF_S, HOUR_S
from runner.system.gpus import Gpu

GB = 10**9
# About 100 million parameters.
MODEL = ModelShape(
    parameters=100_000_000, tensors=100, linear=90_000_000, largest_layer=7_000_000, layers=12, hidden=768,
    intermediate=3072, heads=12, vocab=32000, adapter=1_000_000, adapter_tensors=96,
    base_bytes=500_000_000,
)  # fmt: skip
H100 = [Gpu(number, 80 * GB) for number in range(8)]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "measure", lambda self, nbytes: Rates(write=2e9))
    monkeypatch.setattr(module, "_memory_rate", lambda: 5e9)
    # Simulated runs: enough for the order of two goodputs.
    monkeypatch.setattr(advice, "_RUNS", 20)


def plan(folder: Path, gpus: list[Gpu], given: Assumptions | None = None, **sections: Any) -> Plan:
    sections = {"model": {"name_or_path": "org/model"}, "trainer": {"bf16": True}, **sections}
    config = Config.model_validate({"output_dir": str(folder), **sections})
    return make_plan(config, given or Assumptions(work_hours=2.0), find=lambda: gpus, examine=lambda config: MODEL)


def test_what_nobody_states_is_assumed_and_said(tmp_path: Path) -> None:
    made = plan(tmp_path, H100)
    assert (made.nnodes, made.local_ranks, made.memory_bytes) == (1, 8, 80 * GB)
    assert made.chosen is not None and made.chosen.name == "full, DDP"
    assert made.mttf_s == GPU_MTTF_S / 8 and made.rates == {"copy": 20e9, "write": 2e9, "read": 2e9}
    text = "\n".join(made.assumed)
    assert all(part in text for part in ("no price", "8 ranks", "20 GB/s", "--step-seconds"))


def test_what_the_user_states_is_not_assumed(tmp_path: Path) -> None:
    given = Assumptions(work_hours=2.0, mttf_hours=10.0, copy_rate=7e9, step_s=0.5, reclaims_per_day=0.0)
    made = plan(tmp_path, H100, given, cost={"price_per_hour": 3.0, "currency": "EUR"})
    assert (made.mttf_s, made.rates["copy"], made.currency) == (10 * HOUR_S, 7e9, "EUR")
    text = "\n".join(made.assumed)
    assert not any(part in text for part in ("no price", "Meta", "--copy-rate", "--step-seconds"))
    assert list(made.outlooks) == ["on demand"]


def test_a_spot_node_costs_less_and_loses_more(tmp_path: Path) -> None:
    given = Assumptions(work_hours=20.0, mttf_hours=1000.0, reclaims_per_day=24.0)
    made = plan(tmp_path, H100, given, cost={"price_per_hour": 10.0, "spot_discount": 0.6})
    (demand, price), (spot, reduced) = made.outlooks.values()
    assert price is not None and reduced is not None
    assert spot.goodput < demand.goodput and reduced < price
    # Nothing is paid while the node is missing.
    paid_s = spot.wall_s - spot.seconds[NOT_RUNNING]
    assert reduced == pytest.approx(0.4 * 10.0 * paid_s / HOUR_S) and paid_s < spot.wall_s


def test_the_smallest_gpu_counts(tmp_path: Path) -> None:
    assert plan(tmp_path, [Gpu(0, 80 * GB), Gpu(1, 40 * GB)]).memory_bytes == 40 * GB


def test_gpus_that_are_not_here_need_a_memory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--gpus needs --gpu-memory"):
        plan(tmp_path, [], Assumptions(gpus=4))
    made = plan(tmp_path, [], Assumptions(gpus=4, gpu_memory=24 * GB, work_hours=2.0))
    assert (made.local_ranks, made.memory_bytes) == (4, 24 * GB)


def test_without_gpus_ranks_share_the_nodes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 64 * GB)
    made = plan(tmp_path, [])
    assert (made.local_ranks, made.memory_bytes, made.rates["copy"]) == (2, 32 * GB, 5e9)


def test_where_nothing_fits_there_is_no_outlook(tmp_path: Path) -> None:
    made = plan(tmp_path, [], Assumptions(gpus=2, gpu_memory=GB // 10))
    assert made.chosen is None and made.saving is None and made.outlooks == {} and "nothing fits" in made.why
    assert json.loads(json.dumps(made.to_dict()))["chosen"] is None
    assert "strategy  none: nothing fits" in page(made)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (OSError(30, "Read-only file system"), "cannot be used: Read-only file system"),
        (CheckpointError("no such bucket"), "cannot be used: no such bucket"),
        (None, "has no space for a measurement"),
    ],
)
def test_a_location_that_cannot_be_measured_is_named(
    answer: Exception | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: LocalStorage, nbytes: int) -> Rates | None:
        if answer is not None:
            raise answer
        return None

    monkeypatch.setattr(LocalStorage, "measure", measure)
    with pytest.raises(UsageError, match=problem):
        plan(tmp_path, H100)


def test_a_measured_read_rate_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "measure", lambda self, nbytes: Rates(write=2e9, read=1e9))
    assert plan(tmp_path, H100).rates["read"] == 1e9


def test_the_plan_as_json_and_as_a_page(tmp_path: Path) -> None:
    made = plan(tmp_path, H100, cost={"price_per_hour": 10.0})
    body = json.loads(json.dumps(made.to_dict()))
    assert body["chosen"] == "full, DDP" and body["ranks_per_node"] == 8
    assert body["outlooks"]["on demand"]["cost"] == made.outlooks["on demand"][1]
    text = page(made)
    assert "100.0 M parameters, 1 node(s) of 8 ranks, 80.00 GB per GPU" in text
    assert "strategy  full, DDP: as configured, and it fits" in text and "USD" in text
    assert all(f"assumed: {line[:30]}" in text for line in made.assumed)


def page(made: Plan) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(render(made))
    file: Any = console.file
    return str(file.getvalue())
