"""Loading a configuration. Precedence: defaults < YAML < environment < command line.

The environment is read in one function, from one table of variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from runner.config import trainer_options
from runner.config.accepted import accepted, key_at
from runner.config.checks import SourceOf, check_all, check_model
from runner.config.schema import DEFAULT_CONFIG, Config, MeshConfig
from runner.errors import UsageError
from runner.program.program import Program
from runner.system.text import choice_of, shortened

# Variable → dotted configuration key. The names are common in PyTorch, Kubeflow and Hugging Face.
CONFIG_VARIABLES: dict[str, str] = {
    "EPOCHS": "trainer.num_train_epochs",
    "BATCH_SIZE": "trainer.per_device_train_batch_size",
    "LEARNING_RATE": "trainer.learning_rate",
    "OUTPUT_DIR": "output_dir",
    "AIM_REPO": "tracking.aim_repo",
    "MODEL_NAME": "model.name_or_path",
    "RUNNER_NOTIFY_URL": "notify.url",
    "MASTER_ADDR": "launch.master_addr",
    "MASTER_PORT": "launch.master_port",
    "WORLD_SIZE": "launch.world_size",
    "RANK": "launch.node_rank",
    # AWS Batch sets these in multi-node parallel jobs, except the last one on the main node.
    "AWS_BATCH_JOB_NUM_NODES": "launch.nnodes",
    "AWS_BATCH_JOB_NODE_INDEX": "launch.node_rank",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "launch.master_addr",
    # torchrun's own names, which Kubeflow's Trainer sets; they take precedence over those above.
    "PET_MASTER_ADDR": "launch.master_addr",
    "PET_MASTER_PORT": "launch.master_port",
    "PET_NNODES": "launch.nnodes",
    "PET_NPROC_PER_NODE": "launch.nproc_per_node",
    "PET_NODE_RANK": "launch.node_rank",
    "PET_RDZV_BACKEND": "launch.rdzv_backend",
    "PET_RDZV_ENDPOINT": "launch.rdzv_endpoint",
}
# The variables that torchrun sets for each rank.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# All other variables reach the ranks unchanged: NCCL_*, TORCH_*, CUDA_*, HF_*, OMP_NUM_THREADS, GLOO_SOCKET_IFNAME.

# A section whose values no message repeats.
_SECRET = "notify"
_INT = "tag:yaml.org,2002:int"
_MESH = MeshConfig.__name__


def load_config(
    path: str | None,
    environment: Mapping[str, str],
    settings: Sequence[tuple[str, Any, str]] = (),
    *,
    needs_data: bool = True,
    program: Program | None = None,
) -> Config:
    """Resolve a configuration.

    Args:
        path: YAML file. Without one the bundled job is the base, unless `program` is given, or the environment or
            `settings` name a model or data: nothing of the bundled job applies to another job.
        environment: Environment variables, usually `os.environ`.
        settings: (dotted key, value, as the user wrote it) of each setting on the command line.
        needs_data: Whether a model must be configured and the training data must exist.
        program: The user's own, which needs no model here.

    Returns:
        The validated configuration.

    Raises:
        UsageError: A file is missing or malformed, a key is unknown, a value is not allowed, or no model is given.
    """
    sources: dict[str, str] = {}
    overrides: list[tuple[str, Any, str]] = []
    for key, (value, variable) in settings_from_environment(environment).items():
        overrides.append((key, value, variable))
        sources[key] = f"environment variable {variable}"
    for key, value, written in settings:
        overrides.append((key, value, written))
        sources[key] = f"command line {shortened(written)}"
    if "launch.nnodes" in sources:
        # It says nothing more then; where PET_NPROC_PER_NODE is auto, Kubeflow's Training Operator counts pods in it.
        overrides = [override for override in overrides if override[2] != "WORLD_SIZE"]
    document: dict[str, Any] = {}
    if path is not None:
        document = _read_yaml(Path(path))
    elif program is None and not _names_a_job(overrides):
        document = _read_yaml(DEFAULT_CONFIG)
    for key, value, written in overrides:
        _set(document, key, value, written)

    def source_of(key: str) -> str:
        return sources.get(key, str(path) if path is not None else "default configuration")

    document.setdefault("output_dir", _default_folder(program, path, document))
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        raise UsageError(_explain(error, source_of)) from None
    config.trainer = trainer_options.validate(config.trainer, source_of)
    check_all(config, source_of, needs_data=needs_data)
    if needs_data and program is None:
        check_model(config, source_of)
    return config


def load_recorded(path: Path) -> Config:
    """Return the configuration that a start has recorded in its folder.

    An earlier version may have recorded keys, or values, which this one does not know any more: their defaults apply.

    Raises:
        UsageError: The file cannot be read, or is not a configuration.
    """
    document = _read_yaml(path)
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        for problem in error.errors():
            _drop(document, problem["loc"])
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise UsageError(_explain(error, lambda key: str(path))) from None


def _drop(document: Any, location: tuple[int | str, ...]) -> None:
    """Remove the innermost key that is in the document; behind it pydantic names the kinds of a union."""
    for part, following in zip(location, (*location[1:], None), strict=True):
        if not isinstance(document, dict) or part not in document:
            return
        inner = document[part]
        if not (isinstance(inner, dict) and following in inner):
            del document[part]
            return
        document = inner


def settings_from_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return {dotted key: (text value, name of the variable)} of the variables that are set and not empty."""
    return {
        key: (environment[variable], variable)
        for variable, key in CONFIG_VARIABLES.items()
        if environment.get(variable, "") != ""
    }


def _names_a_job(overrides: Sequence[tuple[str, Any, str]]) -> bool:
    """Return whether the environment or the command line name a model or data."""
    document: dict[str, Any] = {}
    for key, value, written in overrides:
        _set(document, key, value, written)
    return bool(_value(document, "model", "name_or_path") or _value(document, "data", "path"))


def _value(document: Mapping[str, Any], section: str, key: str) -> Any:
    values = document.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _default_folder(program: Program | None, path: str | None, document: Mapping[str, Any]) -> str:
    """Return the folder of a run for which none is configured."""
    data, model = _value(document, "data", "path"), _value(document, "model", "name_or_path")
    if program is not None:
        name = program.stem
    elif path is not None:
        name = Path(path).stem
    elif model:
        name = Path(os.path.abspath(str(model))).name  # noqa: PTH100
    else:
        name = Path(str(data)).stem if data else ""
    return f"runs/{name or 'default'}"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads 1:3 as text, as YAML 1.2 does; in YAML 1.1 it is the number 63, to base 60."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)


def parse_setting(text: str) -> tuple[str, Any, str]:
    """Return dotted key, value and text of the `KEY=VALUE` of `--set`, whose value is YAML.

    Raises:
        UsageError: There is no `=`, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UsageError(
            f"--set {shortened(repr(text))}: not KEY=VALUE; write for example --set trainer.learning_rate=1e-4"
        )
    if not text.isascii() and text != text.encode(errors="replace").decode():
        raise UsageError(
            f"--set {shortened(repr(text))}: bytes that are no UTF-8 cannot be written to the configuration; rename it"
        )
    plain = value.strip("\n")
    try:
        parsed = yaml.load(plain, _Loader)
    except yaml.YAMLError:
        raise UsageError(f"--set {shortened(repr(text))}: the value is not valid YAML; quote it") from None
    if isinstance(parsed, str) and "\n" in plain and plain[0] not in "\"'|>":
        # YAML reads a line break in a plain text as a space: another file.
        parsed = plain
    return key, parsed, f"--set {text if key.partition('.')[0] != _SECRET else f'{key}=...'}"


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not UTF-8 text; give a YAML file") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: not valid YAML{_place_of(error)}; correct it") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{file}: not a mapping; write one with the keys {', '.join(Config.model_fields)}")
    # A section whose keys are all comments reads as null.
    return {key: value for key, value in document.items() if value is not None or key not in Config.model_fields}


def _place_of(error: yaml.YAMLError) -> str:
    """Return where a text is no YAML, and why, as far as that is known."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{where} ({shortened(problem or getattr(error, 'reason', '') or str(error), 120)})"


def _set(document: dict[str, Any], key: str, value: Any, written: str) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        child = document.setdefault(parent, {})
        if child is None:
            child = document[parent] = {}
        if not isinstance(child, dict):
            raise UsageError(
                f"{shortened(written)}: {shortened(parent)}={shortened(repr(child))} is a value, not a section; remove "
                "one of the two"
            )
        document = child
    document[leaf] = value


def _explain(error: ValidationError, source_of: SourceOf) -> str:
    """Return the first problem as one line."""
    problems = error.errors()
    # Of a key that may be a name or a section, what is wrong in the section, if one was written.
    inside = [one for one in problems if _MESH in one["loc"] and one["type"] != "model_type"]
    problem = inside[0] if inside else problems[0]
    location = [str(part) for part in problem["loc"]]
    key, schema = key_at(location)
    value = shortened(repr(problem["input"])) if location[:1] != [_SECRET] else "..."
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown_key(key, location[-1], value, schema, source_of)
    if problem["type"] == "value_error":
        return f"{source_of(key)}: {key}={value} is not allowed: {problem['ctx']['error']}"
    return f"{source_of(key)}: {key}={value} is not allowed: use {accepted(schema)}"


def _unknown_key(section: str, name: str, value: str, schema: Mapping[str, Any], source_of: SourceOf) -> str:
    key = f"{section}.{name}" if section else name
    known: Mapping[str, Any] = next(
        (one["properties"] for one in (schema, *schema.get("anyOf", ())) if "properties" in one), {}
    )
    hint = choice_of(known, name, "see `runner config`, which prints all keys")
    return f"{source_of(key)}: unknown key {shortened(key)} (value {value}); {hint}"
