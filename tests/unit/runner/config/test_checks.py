"""Checks of a configuration that need more than one key, each with the source of the key at fault, or this node."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runner.config import checks
from runner.config.checks import check_all, check_has_device, check_has_gpu, check_model, promised_gpu, shape_of
from runner.config.load import load_config
from runner.config.schema import Config
from runner.errors import UsageError


def source_of(key: str) -> str:
    return f"<{key}>"


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name_or_path": "org/model"}, **sections})


def check(needs_data: bool = True, **sections: Any) -> Config:
    checked = config(**sections)
    check_all(checked, source_of, needs_data=needs_data)
    return checked


def test_a_model_is_a_hub_name_a_folder_or_a_new_one(tmp_path: Path) -> None:
    for model in ({"name_or_path": "org/model"}, {"name_or_path": str(tmp_path)}, {"config": {"hidden_size": 8}}):
        check_model(config(model=model), source_of)
    for model, problem in (({}, "no model is configured"), ({"name_or_path": "./no"}, "'./no' does not exist")):
        with pytest.raises(UsageError, match=problem):
            check_model(config(model=model), source_of)


@pytest.mark.parametrize(
    ("launch", "problem"),
    [
        ({}, None),
        ({"node_rank": 1, "nnodes": 2}, None),
        ({"node_rank": 1, "world_size": 2}, None),
        ({"node_rank": 1}, "<launch.node_rank>: node rank 1 needs more than one node"),
        ({"node_rank": 2, "nnodes": 2}, "<launch.node_rank>: node rank 2 is not one of 2 nodes; use 0 to 1"),
        ({"node_rank": 2, "nnodes": "1:2"}, None),
    ],
)
def test_numbers_of_nodes_and_ranks(launch: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        check(launch=launch)
        return
    with pytest.raises(UsageError, match=re.escape(problem)):
        check(launch=launch)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"launch": {"rdzv_endpoint": "host:65535"}}, "<launch.rdzv_endpoint>: port 65536"),
        ({"checkpoint": {"location": "no://host/x"}}, "<checkpoint.location>: "),
        ({"checkpoint": {"local_tier": "s3://bucket/x"}}, "<checkpoint.local_tier>: "),
        ({"checkpoint": {"memory_limit": "much"}}, "<checkpoint.memory_limit>: checkpoint.memory_limit: "),
        ({"data": {"path": "missing.jsonl"}}, "<data.path>: data.path='missing.jsonl' does not exist"),
        ({"data": {"path": "./missing"}}, "<data.path>: data.path='./missing' does not exist"),
        ({"data": {"validation_path": "no.csv"}}, "<data.validation_path>: data.validation_path='no.csv' does not"),
        ({"data": {"path": "no://host/x.csv"}}, "<data.path>: data.path='no://host/x.csv': "),
        (
            {"data": {"path": "org/set", "streaming": True, "validation_share": 0.1}, "trainer": {"max_steps": 5}},
            "<data.validation_share>: data.validation_share is not allowed with data.streaming",
        ),
        ({"data": {"path": "org/set", "streaming": True}}, "<data.streaming>: data.streaming needs trainer.max_steps"),
        ({"trainer": {"fsdp_config": {"version": 2}}}, "<trainer.fsdp_config>: trainer.fsdp_config needs strategy"),
        ({"strategy": "fsdp", "trainer": {"fsdp_config": {"version": 1}}}, "write FSDP2's options as a mapping"),
        ({"strategy": "fsdp", "trainer": {"fsdp_config": "a.json"}}, "write FSDP2's options as a mapping"),
        ({"strategy": "deepspeed"}, "<strategy>: strategy needs DeepSpeed's configuration: set trainer.deepspeed to"),
        ({"trainer": {"deepspeed": {}}}, "<trainer.deepspeed>: trainer.deepspeed needs strategy: deepspeed"),
        (
            {"strategy": "deepspeed", "trainer": {"deepspeed": "missing.json"}},
            "<trainer.deepspeed>: trainer.deepspeed='missing.json' cannot be read: No such file",
        ),
        (
            {"strategy": "deepspeed", "trainer": {"deepspeed": {"zero_optimization": {"stage": 0}}}},
            "trainer.deepspeed has no ZeRO stage: set zero_optimization.stage to 1, 2 or 3",
        ),
        (
            {"method": {"type": "qlora"}, "model": {"config": {"hidden_size": 64}}},
            "<method.type>: method.type=qlora needs a model to quantise: set model.name_or_path",
        ),
        (
            {"strategy": "deepspeed", "method": {"type": "qlora"}, "model": {"name_or_path": "org/model"}},
            "<method.type>: method.type=qlora is not supported with strategy=deepspeed yet: use ddp",
        ),
        ({"elastic": {"virtual_ranks": 4}}, "<elastic.virtual_ranks>: elastic.virtual_ranks needs elastic.mode=exact"),
        ({"elastic": {"mode": "exact"}, "strategy": "fsdp"}, "<elastic.mode>: elastic.mode=exact is not possible with"),
        (
            {
                "elastic": {"mode": "exact"},
                "data": {"path": "org/set", "streaming": True},
                "trainer": {"max_steps": 5},
            },
            "elastic.mode=exact is not possible with data.streaming",
        ),
        ({"strategy": {"tp": 1}}, "<strategy>: strategy: {tp: 1, dp_shard: 1} is a mesh of one rank"),
        ({"strategy": {"tp": 2}, "method": {"type": "lora"}}, "strategy: {tp: 2, dp_shard: 1} is not supported with"),
        (
            {"strategy": {"tp": 2, "dp_shard": 2}, "launch": {"nnodes": "1:2", "nproc_per_node": 2}},
            "needs 4 ranks for each copy, and nodes of 2 come and go",
        ),
        ({"strategy": {"tp": 2}, "trainer": {"fsdp_config": {"version": 2}}}, "trainer.fsdp_config needs strategy"),
    ],
)
def test_a_mistake_names_the_source_of_its_key(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        check(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"path": "org/set", "streaming": True}, "trainer": {"max_steps": 5}},
        {
            "data": {"path": "org/set", "streaming": True, "validation_path": "a/b", "validation_split": "test"},
            "trainer": {"max_steps": 5},
        },
        {"strategy": "fsdp", "trainer": {"fsdp_config": {"reshard_after_forward": True}}},
        {"strategy": "fsdp_all_nodes", "trainer": {"fsdp_config": {"reshard_after_forward": True}}},
        {"data": {"path": "file:///anywhere/x.csv"}},
        {"strategy": {"tp": 2, "dp_shard": 2}, "launch": {"nnodes": "1:2", "nproc_per_node": 8}},
        {"strategy": "fsdp_all_nodes", "method": {"type": "qlora"}, "model": {"name_or_path": "org/model"}},
        {"strategy": {"dp_shard": 8}, "launch": {"nnodes": 2, "nproc_per_node": 4}},
    ],
)
def test_what_can_be_combined(sections: dict[str, Any]) -> None:
    check(**sections)


def test_data_that_a_command_does_not_need_may_be_missing() -> None:
    check(needs_data=False, data={"path": "missing.jsonl"})


def test_data_paths_become_absolute_and_keep_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows-v1.jsonl").touch()
    Path("rows.jsonl").symlink_to("rows-v1.jsonl")
    data = check(data={"path": "rows.jsonl", "validation_path": "s3://bucket/x.csv"}, trainer={}).data
    assert data.path == str(tmp_path / "rows.jsonl") and data.validation_path == "s3://bucket/x.csv"


def test_deepspeeds_configuration_becomes_part_of_the_runs(tmp_path: Path) -> None:
    """A restart may find another file, or none."""
    file, config = tmp_path / "zero3.json", {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
    file.write_text(json.dumps(config))
    assert check(strategy="deepspeed", trainer={"deepspeed": str(file)}).trainer["deepspeed"] == config
    assert check(strategy="deepspeed", trainer={"deepspeed": config}).trainer["deepspeed"] == config
    file.write_text("{")
    with pytest.raises(UsageError, match=r"zero3.json' is not JSON: "):
        check(strategy="deepspeed", trainer={"deepspeed": str(file)})


def test_deepspeed_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package; pip install deepspeed"):
        check(strategy="deepspeed", trainer={"deepspeed": {"zero_optimization": {"stage": 3}}})


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
        # Training Operator 1.8 and 1.9, one pod with 8 GPUs, and two: WORLD_SIZE counts pods.
        (8, {}, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "1", "RANK": "0"}, (1, 8)),
        (8, {}, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "2", "RANK": "1"}, (2, 8)),
        (8, {}, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16", "PET_NODE_RANK": "1"}, (2, 8)),
        (1, {}, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "1", "RANK": "0"}, (1, 1)),
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


def test_one_rank_for_each_gpu_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It meant two ranks on a machine without GPUs."""
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    for number in ("gpu", "xpu"):
        # It may be for another machine, such as in `runner plan` on a login node.
        found = check(launch={"nproc_per_node": number})
        with pytest.raises(UsageError, match=r"nproc_per_node=gpu needs a GPU, and this machine has none: use auto"):
            check_has_device(found)
    check_has_device(check(launch={"nproc_per_node": "cpu"}))
    # Whether torch can use it is found once it is loaded.
    (tmp_path / "nvidia0").touch()
    check_has_device(found)
    assert shape_of(found, 4) == (1, 4)
    with pytest.raises(UsageError, match="needs a GPU"):
        check_has_gpu(found)
    check_has_gpu(check(launch={"nproc_per_node": "auto"}))


def test_sizes_of_a_new_model_are_not_those_of_a_pretrained_one(tmp_path: Path) -> None:
    """What `runner init` writes, with a model's name: the ranks ended with a report that was not shown."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "attention_dropout": 0.1}
    with pytest.raises(
        UsageError, match=r"<model\.config>: model\.config sets sizes \(hidden_size\).*model\.name_or_path"
    ):
        check_model(config(model={"name_or_path": "org/model", "config": sizes}), source_of)
    check_model(config(model={"name_or_path": "org/model", "config": {"attention_dropout": 0.1}}), source_of)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    check_model(config(model={"name_or_path": str(tmp_path), "config": sizes}), source_of)
    with pytest.raises(UsageError, match=r"model\.config\.vocab_size cannot be set for a new model: use model\.vocab"):
        check_model(config(model={"name_or_path": None, "config": {"vocab_size": 8}}), source_of)
