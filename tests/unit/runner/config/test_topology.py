"""How many ranks and machines follow from options, variables and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.load import load_config
from runner.config.schema import Config
from runner.config.topology import promised_gpu, shape_of
from runner.errors import UsageError


def shape(accelerators: int, settings: dict[str, object], **environment: str) -> tuple[int, int]:
    config = load_config(None, environment, [(f"launch.{key}", value, key) for key, value in settings.items()])
    return shape_of(config, accelerators)


@pytest.mark.parametrize(
    ("accelerators", "settings", "environment", "expected"),
    [
        (0, {}, {}, (1, 2)),
        (8, {}, {}, (1, 8)),
        (8, {"nproc_per_node": 4}, {}, (1, 4)),
        # The reference PyTorchJob: two pods of one GPU each.
        (1, {}, {"WORLD_SIZE": "2", "RANK": "1"}, (2, 1)),
        # The same variables on one machine with two GPUs.
        (2, {}, {"WORLD_SIZE": "2", "RANK": "0"}, (1, 2)),
        (4, {"nnodes": 3}, {}, (3, 4)),
        # A spare.
        (4, {"nnodes": "2:3", "node_rank": 3}, {}, (3, 4)),
    ],
)
def test_shape(
    accelerators: int,
    settings: dict[str, object],
    environment: dict[str, str],
    expected: tuple[int, int],
) -> None:
    assert shape(accelerators, settings, **environment) == expected


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(UsageError, match=r"WORLD_SIZE=3 is not a multiple of the 2 ranks"):
        shape(2, {}, WORLD_SIZE="3")
    with pytest.raises(UsageError, match=r"node rank 1 .* needs more than 1 node"):
        shape(2, {}, WORLD_SIZE="2", RANK="1")


@pytest.mark.parametrize(
    ("mesh", "accelerators", "nnodes", "problem"),
    [
        ({"tp": 2, "dp_shard": 2}, 4, 2, None),
        ({"dp_shard": 8}, 4, 2, None),
        ({"tp": 2, "dp_shard": 4}, 6, 2, "needs a multiple of 8 ranks, and this run has 12"),
        ({"tp": 4, "dp_shard": 2}, 2, 4, "would reach over nodes of 2 ranks"),
    ],
)
def test_a_mesh_has_as_many_ranks(mesh: dict[str, int], accelerators: int, nnodes: int, problem: str | None) -> None:
    config = Config.model_validate({"strategy": mesh, "launch": {"nnodes": nnodes}})
    if problem is None:
        assert shape_of(config, accelerators) == (nnodes, accelerators)
        return
    with pytest.raises(UsageError, match=problem):
        shape_of(config, accelerators)


@pytest.mark.parametrize(
    ("files", "environment", "told"),
    [
        ([], {}, None),
        # Without a GPU, these may be there all the same.
        (["nvidiactl", "nvidia-uvm"], {}, None),
        (["nvidiactl", "nvidia0", "nvidia1"], {}, "/nvidia0"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, None),
        ([], {"NVIDIA_VISIBLE_DEVICES": "all"}, "NVIDIA_VISIBLE_DEVICES=all"),
        ([], {"NVIDIA_VISIBLE_DEVICES": "void"}, None),
    ],
)
def test_a_machine_that_has_gpus_says_so(
    files: list[str], environment: dict[str, str], told: str | None, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    found = promised_gpu(environment, tmp_path)
    assert (found is None) if told is None else told in str(found)
