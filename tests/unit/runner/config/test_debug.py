"""The scaled-down job of `runner start --debug`."""

from __future__ import annotations

from typing import Any

import pytest

from runner.config.debug import debugging_environment, for_debugging
from runner.config.schema import Config


def job(**sections: Any) -> Config:
    return Config.model_validate({"output_dir": "runs/large/", "model": {"name_or_path": "org/70b"}, **sections})


def test_the_runs_own_checkpoints_and_services_are_left_alone() -> None:
    config = job(
        checkpoint={"location": "s3://bucket/run", "local_tier": "/fast", "save_minutes": 5},
        tracking={"aim_repo": "/aim"},
        monitoring={"port": 9400},
        restart={"max_restarts": 7},
    )
    small = for_debugging(config, 0)
    assert small.output_dir == "runs/large-debug" and small.checkpoint_location == "runs/large-debug/checkpoints"
    assert (small.checkpoint.local_tier, small.checkpoint.save_minutes, small.checkpoint.memory_limit) == (
        None,
        None,
        0,
    )
    assert (small.tracking.aim_repo, small.monitoring.port, small.restart.max_restarts) == (None, None, 0)
    assert small.model.name_or_path is None and small.model.config
    # The job itself is not changed.
    assert config.checkpoint.location == "s3://bucket/run" and config.model.name_or_path == "org/70b"


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_at_most_two_ranks_on_one_node(num_gpus: int, ranks: int) -> None:
    config = job(launch={"nnodes": 4, "nproc_per_node": 8, "rdzv_endpoint": "host:1", "cold": True})
    launch = for_debugging(config, num_gpus).launch
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_endpoint, launch.cold) == (1, ranks, None, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_steps": 20, "max_length": 128, "per_device_train_batch_size": 4}),
        ({"max_steps": 7, "max_length": 32}, {"max_steps": 7, "max_length": 32}),
        ({"max_steps": -1, "max_length": None}, {"max_steps": 20, "max_length": 128}),
        ({"max_steps": 9000, "max_length": 8192}, {"max_steps": 20, "max_length": 128}),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 64}, {"gradient_accumulation_steps": 2}),
        ({"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 1}),
        ({"learning_rate": 0.5, "save_strategy": "epoch"}, {"learning_rate": 0.5, "save_strategy": "steps"}),
    ],
)
def test_large_values_are_lowered_and_small_ones_kept(given: dict[str, Any], expected: dict[str, Any]) -> None:
    trainer = for_debugging(job(trainer=given), 0).trainer
    assert {name: trainer[name] for name in expected} == expected


@pytest.mark.parametrize(("rows", "expected"), [(None, 200), (50, 50), (10_000, 200)])
def test_few_rows(rows: int | None, expected: int) -> None:
    assert for_debugging(job(data={"max_rows": rows}), 0).data.max_rows == expected


@pytest.mark.parametrize(("share", "expected"), [(None, None), (0.001, 0.05), (0.2, 0.2)])
def test_the_share_for_validation_keeps_at_least_a_few_rows(share: float | None, expected: float | None) -> None:
    assert for_debugging(job(data={"validation_share": share}), 0).data.validation_share == expected


def test_the_users_own_variables_take_precedence() -> None:
    found = debugging_environment({"NCCL_DEBUG": "WARN"}, on_gpu=False)
    assert "NCCL_DEBUG" not in found and found["PYTHONFAULTHANDLER"] == "1"


@pytest.mark.parametrize(("on_gpu", "detail"), [(True, "DETAIL"), (False, "INFO")])
def test_ddp_over_gloo_does_not_log_in_detail(on_gpu: bool, detail: str) -> None:
    assert debugging_environment({}, on_gpu=on_gpu)["TORCH_DISTRIBUTED_DEBUG"] == detail
