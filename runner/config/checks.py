"""Checks of a configuration that need more than one key, or the file system."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from checkpointing.host.environment import not_installed
from runner.config.schema import DATA_LOADERS, DEFAULT_CONFIG, Config
from runner.errors import UsageError

SourceOf = Callable[[str], str]
"""Names where a key was set: the YAML file, an environment variable, or the command line."""


def check_model(config: Config) -> None:
    """Check that a model is configured and, if it is a folder, exists.

    Raises:
        UsageError: It does not.
    """
    if config.model.name_or_path is None and not config.model.config:
        raise UsageError(
            "no model is configured; set model.name_or_path (variable MODEL_NAME) to a hub name or a local folder, or "
            f"model.config to build a new one (the bundled job's is in {DEFAULT_CONFIG})"
        )
    name = config.model.name_or_path
    if name is not None and _is_path(name) and not Path(name).is_dir():
        raise UsageError(f"model.name_or_path={name!r} does not exist; give a model's folder, or a Hub name")


def _is_path(name: str) -> bool:
    """Return whether a name is a local path; asking the Hub for a path takes a minute and gives a misleading answer."""
    first, separator, rest = name.partition("/")
    # Hub names have one or two parts.
    return name.startswith((".", "/", "~")) or "/" in rest or (bool(separator) and Path(first).is_dir())


def check_nodes(config: Config, source_of: SourceOf) -> None:
    """Check the numbers of ranks and nodes.

    Args:
        config: The configuration.
        source_of: Names where a key was set.

    Raises:
        UsageError: They cannot be used.
    """
    launch = config.launch
    if launch.nproc_per_node != "auto" and launch.nproc_per_node < 1:
        raise UsageError(
            f"{source_of('launch.nproc_per_node')}: launch.nproc_per_node={launch.nproc_per_node} is not allowed: "
            "use auto or a number from 1"
        )
    if launch.min_nodes is not None and launch.world_size is None and launch.min_nodes > launch.nnodes:
        raise UsageError(
            f"{source_of('launch.min_nodes')}: launch.min_nodes={launch.min_nodes} is more than launch.nnodes="
            f"{launch.nnodes}; write --nnodes MIN:MAX"
        )
    if launch.node_rank and launch.nnodes == 1 and launch.world_size is None:
        raise UsageError(
            f"{source_of('launch.node_rank')}: node rank {launch.node_rank} needs more than one node; set --nnodes or "
            "WORLD_SIZE"
        )


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


def check_all(config: Config, source_of: SourceOf, *, needs_data: bool) -> None:
    """Run all checks, and make data paths absolute.

    Args:
        config: The configuration; relative data paths in it become absolute.
        source_of: Names where a key was set.
        needs_data: Whether the training data must exist.

    Raises:
        UsageError: A check failed.
    """
    check_nodes(config, source_of)
    _check_storage(config, source_of)
    _check_data_paths(config, source_of, needs_data=needs_data)
    _check_validation(config, source_of)
    if config.data.streaming:
        _check_streaming(config, source_of)
    _check_method(config, source_of)
    _check_strategy(config, source_of)


def _check_storage(config: Config, source_of: SourceOf) -> None:
    try:
        _ = config.launch.peer_address
    except ValueError as error:
        raise UsageError(f"{source_of('launch.rdzv_endpoint')}: {error}") from None
    _check_etcd(config, source_of)
    try:
        _ = config.tiers
    except ValueError as error:
        key = "checkpoint.local_tier" if "local_tier" in str(error) else "checkpoint.location"
        raise UsageError(f"{source_of(key)}: {error}") from None
    try:
        _ = config.checkpoint.memory_limit_bytes
    except ValueError as error:
        raise UsageError(f"{source_of('checkpoint.memory_limit')}: checkpoint.memory_limit: {error}") from None


def _check_etcd(config: Config, source_of: SourceOf) -> None:
    launch, what = config.launch, f"{source_of('launch.rdzv_backend')}: launch.rdzv_backend=etcd-v2"
    if launch.rdzv_backend != "etcd-v2":
        return
    if launch.rdzv_endpoint is None or launch.master_addr is None:
        raise UsageError(
            f"{what} needs --rdzv-endpoint, the host and port of the etcd server, and --master-addr, the first node's "
            "host"
        )
    if importlib.util.find_spec("etcd") is None:
        raise UsageError(f"{what} needs the package python-etcd; pip install 'resilient-training[etcd]'")


def _check_data_paths(config: Config, source_of: SourceOf, *, needs_data: bool) -> None:
    for name in ("path", "validation_path"):
        path = getattr(config.data, name)
        if needs_data and path and "://" not in path and _is_path(path) and not Path(path).exists():
            raise UsageError(
                f"{source_of(f'data.{name}')}: data.{name}={path!r} does not exist; give a .parquet, .jsonl, .json or "
                ".csv file, a folder, or the name of a hub data set"
            )
        if path is None or Path(path).suffix not in DATA_LOADERS:
            continue
        if "://" in path:
            if needs_data and (problem := _unknown_scheme(path)) is not None:
                raise UsageError(f"{source_of(f'data.{name}')}: data.{name}={path!r}: {problem}")
            continue
        if needs_data and not Path(path).is_file():
            raise UsageError(
                f"{source_of(f'data.{name}')}: data.{name}={path!r} does not exist; give a .parquet, .jsonl, .json or "
                ".csv file, or the name of a hub data set"
            )
        # A restart may run in another directory; abspath keeps symbolic links.
        setattr(config.data, name, os.path.abspath(path))  # noqa: PTH100


def _check_validation(config: Config, source_of: SourceOf) -> None:
    metric = str(config.trainer.get("metric_for_best_model") or "")
    if metric.endswith("perplexity"):
        raise UsageError(
            f"{source_of('trainer.metric_for_best_model')}: trainer.metric_for_best_model={metric!r} is not allowed: "
            "use eval_loss, which orders checkpoints the same way"
        )
    split = config.data.validation_split
    source = config.data.validation_path or config.data.path
    if split is not None and (source is None or Path(source).suffix in DATA_LOADERS):
        raise UsageError(
            f"{source_of('data.validation_split')}: data.validation_split={split!r} is a split of a hub data set, and "
            f"{source or 'the bundled data'} has none: use data.validation_path or data.validation_share"
        )
    given = [name for name in ("validation_path", "validation_share") if getattr(config.data, name) is not None]
    if len(given) > 1 or (config.data.validation_share is not None and split is not None):
        raise UsageError(
            f"{source_of('data.validation_share')}: data.validation_share={config.data.validation_share} is not "
            "allowed together with data.validation_path or data.validation_split: choose one"
        )


def _check_streaming(config: Config, source_of: SourceOf) -> None:
    needs_all_rows = {
        "data.validation_share": config.data.validation_share is not None,
        "data.validation_split": config.data.validation_split is not None and config.data.validation_path is None,
    }
    for key, is_set in needs_all_rows.items():
        if is_set:
            raise UsageError(
                f"{source_of(key)}: {key} is not allowed with data.streaming, which never loads all rows: use "
                "data.validation_path"
            )
    if not config.trainer.get("max_steps", 0) > 0:
        raise UsageError(
            f"{source_of('data.streaming')}: data.streaming needs trainer.max_steps, because the length of an epoch is "
            "unknown before its end"
        )


def _check_method(config: Config, source_of: SourceOf) -> None:
    if config.method.type != "qlora":
        return
    what = f"{source_of('method.type')}: method.type=qlora"
    if config.model.name_or_path is None:
        raise UsageError(f"{what} needs a model to quantise: set model.name_or_path, or use lora")
    if config.strategy == "deepspeed":
        raise UsageError(
            f"{what} is not supported with strategy=deepspeed yet: use ddp, which suits the small state of an adapter, "
            "or fsdp, which shards the base in 4 bits"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"{what} needs the package; pip install bitsandbytes")


def _check_strategy(config: Config, source_of: SourceOf) -> None:
    _check_mesh(config, source_of)
    _check_deepspeed(config, source_of)
    _check_exact(config, source_of)
    fsdp = config.trainer.get("fsdp_config")
    if fsdp and config.strategy not in ("fsdp", "fsdp_all_nodes"):
        raise UsageError(f"{source_of('trainer.fsdp_config')}: trainer.fsdp_config needs strategy: fsdp")
    if fsdp and (not isinstance(fsdp, dict) or fsdp.get("version", 2) != 2):
        raise UsageError(
            f"{source_of('trainer.fsdp_config')}: trainer.fsdp_config={fsdp!r} is not allowed: write FSDP2's "
            "options as a mapping, without version or with version: 2"
        )


def _check_exact(config: Config, source_of: SourceOf) -> None:
    elastic = config.elastic
    if elastic.mode != "exact":
        if elastic.virtual_ranks is not None:
            raise UsageError(f"{source_of('elastic.virtual_ranks')}: elastic.virtual_ranks needs elastic.mode=exact")
        return
    what = f"{source_of('elastic.mode')}: elastic.mode=exact"
    if config.strategy != "ddp":
        raise UsageError(
            f"{what} is not possible with strategy: {config.strategy}: its sums over ranks cannot be put in order; use "
            "strategy: ddp"
        )
    if config.data.streaming:
        raise UsageError(
            f"{what} is not possible with data.streaming: which samples a rank reads depends on its number"
        )


def _check_mesh(config: Config, source_of: SourceOf) -> None:
    mesh, launch = config.mesh, config.launch
    if mesh is None:
        return
    what = f"{source_of('strategy')}: strategy: {mesh}"
    if mesh.ranks == 1:
        raise UsageError(f"{what} is a mesh of one rank: write strategy: ddp")
    if config.method.type != "full":
        raise UsageError(
            f"{what} is not supported with method.type={config.method.type} yet: use strategy: fsdp, which shards the "
            "frozen base"
        )
    nproc = launch.nproc_per_node
    if launch.min_nodes is not None and launch.min_nodes != launch.nnodes and nproc != "auto" and nproc % mesh.ranks:
        raise UsageError(
            f"{what} needs {mesh.ranks} ranks for each copy, and nodes of {nproc} come and go (--nnodes): choose a "
            "mesh whose ranks fit into a node, or a fixed number of nodes"
        )


def _check_deepspeed(config: Config, source_of: SourceOf) -> None:
    """Check DeepSpeed's configuration, and take it into the run's: a restart may find another file, or none."""
    given = config.trainer.get("deepspeed")
    what = f"{source_of('trainer.deepspeed')}: trainer.deepspeed"
    if (given is not None) != (config.strategy == "deepspeed"):
        missing = "strategy: deepspeed" if given is not None else "DeepSpeed's configuration"
        key = "trainer.deepspeed" if given is not None else "strategy"
        hint = "" if given is not None else ": set trainer.deepspeed to the path of a JSON file, or to a mapping"
        raise UsageError(f"{source_of(key)}: {key} needs {missing}{hint}")
    if given is None:
        return
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{what}={given!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{what}={given!r} is not JSON: {error}") from None
    zero = given.get("zero_optimization") if isinstance(given, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UsageError(f"{what} has no ZeRO stage: set zero_optimization.stage to 1, 2 or 3")
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(f"{source_of('strategy')}: strategy: deepspeed needs the package; pip install deepspeed")
    config.trainer["deepspeed"] = given
