"""Checks of a configuration that need more than one key, the file system, or this node."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from checkpointing.host.environment import not_installed
from runner.config.packages import missing_package
from runner.config.schema import DATA_LOADERS, DEFAULT_CONFIG, Config
from runner.errors import GpuMissing, UsageError
from runner.system.text import shortened

SourceOf = Callable[[str], str]
"""Names where a key was set: the YAML file, an environment variable, or the command line."""


# Where the device files of accelerators are, and their names: CUDA, also in WSL, ROCm, XPU.
DEVICES = Path("/dev")
_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*")
_NO_GPU = "launch.nproc_per_node=gpu needs a GPU, and this machine has none: use auto, or a number of ranks"


class _Refused(Exception):
    """A key, and what is wrong with its value; `check_all` adds where it was set."""


def check_all(config: Config, source_of: SourceOf, *, needs_data: bool) -> None:
    """Run all checks, and make data paths absolute.

    Args:
        config: The configuration; relative data paths in it become absolute.
        source_of: Names where a key was set.
        needs_data: Whether the training data must exist.

    Raises:
        UsageError: A check failed.
    """
    try:
        _check_nodes(config)
        _check_storage(config)
        _check_data_paths(config, needs_data=needs_data)
        _check_validation(config)
        _check_streaming(config)
        _check_method(config)
        _check_mesh(config)
        _check_deepspeed(config)
        _check_exact(config)
        _check_fsdp(config)
    except _Refused as refused:
        key, problem = refused.args
        raise UsageError(f"{source_of(key)}: {problem}") from None


# Fields of a new model's configuration that are set from elsewhere, and where.
_OF_NEW_MODELS = {
    "vocab_size": "model.vocab_size",
    "attn_implementation": "model.attn_implementation",
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), "those of its tokenizer, and leave it out"),
}
# Fields of a model's configuration that say the sizes of its tensors.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def check_model(config: Config, source_of: SourceOf) -> None:
    """Check that a model is configured and, if it is a folder, exists, and that what the job asks for is installed.

    Raises:
        UsageError: A check failed.
    """
    if config.model.name_or_path is None and not config.model.config:
        raise UsageError(
            "no model is configured; set model.name_or_path (variable MODEL_NAME) to a hub name or a local folder, or "
            f"model.config to build a new one (the bundled job's is in {DEFAULT_CONFIG})"
        )
    name = config.model.name_or_path
    if name is not None and is_path(name) and not Path(name).is_dir():
        raise UsageError(f"model.name_or_path={name!r} does not exist; give a model's folder, or a Hub name")
    if name is None and (taken := [key for key in _OF_NEW_MODELS if key in config.model.config]):
        where, instead = source_of("model.config"), _OF_NEW_MODELS[taken[0]]
        raise UsageError(f"{where}: model.config.{taken[0]} cannot be set for a new model: use {instead}")
    sizes = [key for key in _SIZES if key in config.model.config]
    if name is not None and sizes and not _has_sizes(Path(name), config.model.config, sizes):
        raise UsageError(
            f"{source_of('model.config')}: model.config sets sizes ({', '.join(sizes)}), and the weights of "
            f"model.name_or_path={shortened(repr(name))} have their own: remove these from model.config, or "
            "model.name_or_path"
        )
    if (missing := missing_package(config)) is not None:
        key, problem = missing
        raise UsageError(f"{source_of(key)}: {problem}")


def _has_sizes(folder: Path, given: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether the model in a folder has these sizes."""
    try:
        own = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(isinstance(own, dict) and own.get(name) == given[name] for name in names)


def is_path(name: str) -> bool:
    """Return whether a name is a local path; asking the Hub for a path takes a minute and gives a misleading answer."""
    first, separator, rest = name.partition("/")
    # Hub names have one or two parts.
    return name.startswith((".", "/", "~")) or "/" in rest or (bool(separator) and Path(first).is_dir())


def _check_nodes(config: Config) -> None:
    launch = config.launch
    if launch.node_rank >= launch.nnodes > 1 and launch.min_nodes is None:
        raise _Refused(
            "launch.node_rank",
            f"node rank {launch.node_rank} is not one of {launch.nnodes} nodes; use 0 to {launch.nnodes - 1}",
        )
    if launch.min_nodes is not None and launch.world_size is None and launch.min_nodes > launch.nnodes:
        raise _Refused(
            "launch.min_nodes",
            f"launch.min_nodes={launch.min_nodes} is more than launch.nnodes={launch.nnodes}; write --nnodes MIN:MAX",
        )
    if launch.node_rank and launch.nnodes == 1 and launch.world_size is None:
        raise _Refused(
            "launch.node_rank",
            f"node rank {launch.node_rank} needs more than one node; set --nnodes or WORLD_SIZE",
        )


def _check_storage(config: Config) -> None:
    try:
        _ = config.launch.peer_address
    except ValueError as error:
        raise _Refused("launch.rdzv_endpoint", str(error)) from None
    try:
        _ = config.tiers
    except ValueError as error:
        raise _Refused(
            "checkpoint.local_tier" if "local_tier" in str(error) else "checkpoint.location", str(error)
        ) from None
    try:
        _ = config.checkpoint.memory_limit_bytes
    except ValueError as error:
        raise _Refused("checkpoint.memory_limit", f"checkpoint.memory_limit: {error}") from None


def _check_data_paths(config: Config, *, needs_data: bool) -> None:
    for name in ("path", "validation_path"):
        key, path = f"data.{name}", getattr(config.data, name)
        if needs_data and path and "://" not in path and is_path(path) and not Path(path).exists():
            raise _Refused(
                key,
                f"{key}={path!r} does not exist; give a .parquet, .jsonl, .json or .csv file, a folder, or the name of "
                "a hub data set",
            )
        if path is None or Path(path).suffix not in DATA_LOADERS:
            continue
        if "://" in path:
            if needs_data and (problem := _unknown_scheme(path)) is not None:
                raise _Refused(key, f"{key}={path!r}: {problem}")
            continue
        if needs_data and not Path(path).is_file():
            raise _Refused(
                key,
                f"{key}={path!r} does not exist; give a .parquet, .jsonl, .json or .csv file, or the name of a hub "
                "data set",
            )
        # A restart may run in another directory; abspath keeps symbolic links.
        setattr(config.data, name, os.path.abspath(path))  # noqa: PTH100


def _unknown_scheme(url: str) -> str | None:
    """Return why files at a URL cannot be read (unknown scheme, missing package), or None."""
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        return str(error)
    except ImportError as error:
        return not_installed("s3fs", "s3") if scheme == "s3" else str(error)
    return None


def _check_validation(config: Config) -> None:
    metric = str(config.trainer.get("metric_for_best_model") or "")
    if metric.endswith("perplexity"):
        raise _Refused(
            "trainer.metric_for_best_model",
            f"trainer.metric_for_best_model={metric!r} is not allowed: use eval_loss, which orders checkpoints the "
            "same way",
        )
    data, split = config.data, config.data.validation_split
    source = data.validation_path or data.path
    if split is not None and (source is None or Path(source).suffix in DATA_LOADERS):
        raise _Refused(
            "data.validation_split",
            f"data.validation_split={split!r} is a split of a hub data set, and {source or 'the bundled data'} has "
            "none: use data.validation_path or data.validation_share",
        )
    if data.validation_share is not None and (data.validation_path is not None or split is not None):
        raise _Refused(
            "data.validation_share",
            f"data.validation_share={data.validation_share} is not allowed together with data.validation_path or "
            "data.validation_split: choose one",
        )


def _check_streaming(config: Config) -> None:
    data = config.data
    if not data.streaming:
        return
    needs_all_rows = {
        "data.validation_share": data.validation_share is not None,
        "data.validation_split": data.validation_split is not None and data.validation_path is None,
    }
    for key, is_set in needs_all_rows.items():
        if is_set:
            raise _Refused(
                key,
                f"{key} is not allowed with data.streaming, which never loads all rows: use data.validation_path",
            )
    if not config.trainer.get("max_steps", 0) > 0:
        raise _Refused(
            "data.streaming",
            "data.streaming needs trainer.max_steps, because the length of an epoch is unknown before its end",
        )


def _check_method(config: Config) -> None:
    key = "method.type"
    if config.method.type != "qlora":
        return
    if config.model.name_or_path is None:
        raise _Refused(key, f"{key}=qlora needs a model to quantise: set model.name_or_path, or use lora")
    if config.strategy == "deepspeed":
        raise _Refused(
            key,
            f"{key}=qlora is not supported with strategy=deepspeed yet: use ddp, which suits the small state of an "
            "adapter, or fsdp, which shards the base in 4 bits",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise _Refused(key, f"{key}=qlora needs the package; pip install bitsandbytes")


def _check_mesh(config: Config) -> None:
    mesh, launch = config.mesh, config.launch
    if mesh is None:
        return
    what = f"strategy: {mesh}"
    if mesh.ranks == 1:
        raise _Refused("strategy", f"{what} is a mesh of one rank: write strategy: ddp")
    if config.method.type != "full":
        raise _Refused(
            "strategy",
            f"{what} is not supported with method.type={config.method.type} yet: use strategy: fsdp, which shards the "
            "frozen base",
        )
    nproc = launch.nproc_per_node
    if (
        launch.min_nodes is not None
        and launch.min_nodes != launch.nnodes
        and isinstance(nproc, int)
        and nproc % mesh.ranks
    ):
        raise _Refused(
            "strategy",
            f"{what} needs {mesh.ranks} ranks for each copy, and nodes of {nproc} come and go (--nnodes): choose a "
            "mesh whose ranks fit into a node, or a fixed number of nodes",
        )


def _check_deepspeed(config: Config) -> None:
    """Check DeepSpeed's configuration, and take it into the run's: a restart may find another file, or none."""
    key, given = "trainer.deepspeed", config.trainer.get("deepspeed")
    if given is not None and config.strategy != "deepspeed":
        raise _Refused(key, f"{key} needs strategy: deepspeed")
    if given is None:
        if config.strategy == "deepspeed":
            raise _Refused(
                "strategy",
                f"strategy needs DeepSpeed's configuration: set {key} to the path of a JSON file, or to a mapping",
            )
        return
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except OSError as error:
            raise _Refused(key, f"{key}={given!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise _Refused(key, f"{key}={given!r} is not JSON: {error}") from None
    zero = given.get("zero_optimization") if isinstance(given, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise _Refused(key, f"{key} has no ZeRO stage: set zero_optimization.stage to 1, 2 or 3")
    if importlib.util.find_spec("deepspeed") is None:
        raise _Refused("strategy", "strategy: deepspeed needs the package; pip install deepspeed")
    config.trainer["deepspeed"] = given


def _check_exact(config: Config) -> None:
    elastic, what = config.elastic, "elastic.mode=exact"
    if elastic.mode != "exact":
        if elastic.virtual_ranks is not None:
            raise _Refused("elastic.virtual_ranks", f"elastic.virtual_ranks needs {what}")
        return
    if config.strategy != "ddp":
        raise _Refused(
            "elastic.mode",
            f"{what} is not possible with strategy: {config.strategy}: its sums over ranks cannot be put in order; use "
            "strategy: ddp",
        )
    if config.data.streaming:
        raise _Refused(
            "elastic.mode",
            f"{what} is not possible with data.streaming: which samples a rank reads depends on its number",
        )


def _check_fsdp(config: Config) -> None:
    key, given = "trainer.fsdp_config", config.trainer.get("fsdp_config")
    if given and config.strategy not in ("fsdp", "fsdp_all_nodes"):
        raise _Refused(key, f"{key} needs strategy: fsdp")
    if given and (not isinstance(given, dict) or given.get("version", 2) != 2):
        raise _Refused(
            key,
            f"{key}={given!r} is not allowed: write FSDP2's options as a mapping, without version or with version: 2",
        )


def shape_of(config: Config, accelerators: int) -> tuple[int, int]:
    """Return the number of nodes and of ranks on this node, by options, variables and the number of GPUs of this node.

    Raises:
        UsageError: The settings contradict each other.
    """
    launch = config.launch
    nproc = launch.nproc_per_node if isinstance(launch.nproc_per_node, int) else accelerators or 2
    nnodes = launch.nnodes
    if launch.world_size is not None and nnodes == 1:
        if launch.world_size % nproc:
            raise UsageError(
                f"WORLD_SIZE={launch.world_size} is not a multiple of the {nproc} ranks on this node; set "
                "--nproc-per-node, or unset WORLD_SIZE"
            )
        nnodes = launch.world_size // nproc
    mesh = config.mesh
    if mesh is not None and nnodes * nproc % mesh.ranks:
        raise UsageError(
            f"strategy: {mesh} needs a multiple of {mesh.ranks} ranks, and this run has {nnodes * nproc}: change the "
            "mesh, --nnodes or --nproc-per-node"
        )
    if mesh is not None and nproc % mesh.tp:
        raise UsageError(
            f"strategy: {{tp: {mesh.tp}}} would reach over nodes of {nproc} ranks, whose links are too slow for that: "
            "choose a tp that divides the ranks of a node, and dp_shard for the rest"
        )
    if launch.node_rank >= nnodes and (launch.min_nodes is None or nnodes == 1):
        raise UsageError(
            f"node rank {launch.node_rank} (--node-rank or RANK) needs more than {nnodes} node(s) of {nproc} "
            "ranks; check --nnodes, WORLD_SIZE and --nproc-per-node"
        )
    return nnodes, nproc


def check_has_rank(config: Config, nnodes: int) -> None:
    """Refuse to be one of several nodes without a rank, which all of them would be in one folder; raises UsageError."""
    if nnodes > 1 and "node_rank" not in config.launch.model_fields_set:
        raise UsageError(
            f"this is one of {nnodes} nodes (--nnodes, PET_NNODES, WORLD_SIZE), and nothing says which: give each "
            "its own --node-rank, from 0 (variables PET_NODE_RANK, RANK); elastic PyTorchJobs set none"
        )


def check_same_nnodes(own: int, leaders: int) -> None:
    """Check that this node was started for as many nodes as the leader; raises UsageError if it was not."""
    if own != leaders:
        raise UsageError(
            f"this node was started with --nnodes {own}, the leader with --nnodes {leaders}; start all nodes with the "
            "same number"
        )


def check_has_device(config: Config) -> None:
    """Refuse at once what `check_has_gpu` would refuse after torch is loaded, where no device file is there.

    Raises:
        UsageError: A rank for each GPU was asked for.
    """
    if not any(path for name in _DEVICE_FILES for path in DEVICES.glob(name)):
        check_has_gpu(config)


def check_has_gpu(config: Config) -> None:
    """Refuse to start ranks on a CPU where one for each GPU was asked for. Called if torch finds none.

    Raises:
        UsageError: That was asked for.
    """
    if config.launch.nproc_per_node == "gpu":
        raise UsageError(_NO_GPU)


def check_promised_gpu(config: Config, environment: Mapping[str, str], devices: Path) -> None:
    """Refuse to train on the CPU of a node that should have GPUs. Called if torch finds none.

    Raises:
        GpuMissing: There should be GPUs, by the variables or the folder of device files (`/dev`), and the user did not
            ask for the CPU.
    """
    promised = promised_gpu(environment, devices) if config.trainer.get("use_cpu") is not True else None
    if promised:
        raise GpuMissing(
            f"{promised}, but torch finds no GPU: the driver is missing, too old for this torch, or has lost "
            "them; check nvidia-smi, or train on the CPU with --set trainer.use_cpu=true or CUDA_VISIBLE_DEVICES=-1"
        )


def promised_gpu(environment: Mapping[str, str], devices: Path) -> str | None:
    """Return the evidence that this node or container should have NVIDIA GPUs, or None."""
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    nodes = sorted(path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if nodes:
        return f"{nodes[0]} exists"
    # The container runtime creates the devices that this variable requests.
    wanted = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return f"NVIDIA_VISIBLE_DEVICES={wanted}" if wanted not in ("", "none", "void") else None
