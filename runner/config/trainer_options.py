"""Names and types of `SFTConfig`'s fields, read from the installed source, so that a typo is reported at once.

Importing `SFTConfig` takes seconds and needs torch. Its fields are plain annotated assignments, so the abstract syntax
trees of its module and of its base class contain their names and types.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from checkpointing.host.environment import not_installed
from runner.config.accepted import accepted
from runner.errors import UsageError
from runner.system.text import choice_of, shortened

# By package, the files with the fields of `SFTConfig` and its base classes, and with the values that they take.
_SOURCES = {
    "transformers": ["trainer_utils.py", "training_args.py"],
    "trl": ["trainer/base_config.py", "trainer/sft_config.py"],
}
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, bool, str, dict, list)}
_TYPES |= {"Any": Any, "Optional": Optional, "Union": Union, "Literal": Literal, "None": None}
# Options that transformers 5.23 renamed. With an older version, the new name in a configuration means the old one.
_FORMER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
# Options that the runner sets itself, and why or what to use instead.
RESERVED = {
    "output_dir": "set the top-level output_dir",
    "resume_from_checkpoint": "use --resume",
    "local_rank": "the launcher sets it",
    "ddp_backend": "the runner chooses gloo on CPUs and nccl on GPUs",
    "save_only_model": "a checkpoint must be complete to resume from",
    "auto_find_batch_size": "the global batch must not change within a run",
    "load_best_model_at_end": "with data.validation_path, _split or _share, best_model is the best checkpoint",
    "fsdp": "set the top-level strategy: fsdp, or fsdp_all_nodes",
    "parallelism_config": "set the top-level strategy to a mesh, such as {tp: 2, dp_shard: 4}",
    "push_to_hub": "push best_model yourself after the run",
    "overwrite_output_dir": "use --resume never --overwrite",
}


@functools.cache
def fields() -> dict[str, Any]:
    """Return {name: type} of all `SFTConfig` options; UsageError if transformers or trl is not installed."""
    found: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for package, files in _SOURCES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(not_installed(package, "sft"))
        root = Path(next(iter(spec.submodule_search_locations)))
        trees = [ast.parse((root / name).read_text(encoding="utf-8")) for name in files if (root / name).exists()]
        values |= {name: kind for tree in trees for name, kind in _enumerations(tree)}
        for tree in trees:
            found |= _fields_of(tree, values)
    return found


def validate(options: dict[str, Any], source_of: Callable[[str], str]) -> dict[str, Any]:
    """Return options by name, with text converted where the field is a number.

    Args:
        options: As they were given.
        source_of: Names where a key was set, for the error.

    Raises:
        UsageError: A name is unknown or reserved, or a value has the wrong type. The text names source, key, value and
            what is allowed.
    """
    # A script's own job has none, and need not have the packages that say which there are.
    known = fields() if options else {}
    checked = {}
    for name, value in options.items():
        source = source_of(f"trainer.{name}")
        if name in RESERVED:
            raise UsageError(f"{source}: trainer.{name} cannot be set: {RESERVED[name]}")
        if name not in known and _FORMER_NAMES.get(name) in known:
            name = _FORMER_NAMES[name]
        if name not in known:
            hint = choice_of(known, name, "see `runner config --trainer-options`")
            raise UsageError(
                f"{source}: trainer.{shortened(name)}={shortened(repr(value))} is not an SFTConfig option; {hint}"
            )
        if name.endswith("_strategy") and value is False:
            value = "no"  # YAML reads an unquoted no as false.
        try:
            result = TypeAdapter(known[name]).validate_python(value)
            # `save_steps: 20` stays 20, although the field is a float to allow shares below 1.
            checked[name] = value if isinstance(value, int) and result == value else result
        except ValidationError:
            raise UsageError(
                f"{source}: trainer.{name}={shortened(repr(value))} is not allowed: {_accepted(known[name], value)}"
            ) from None
    return checked


def _accepted(kind: Any, value: Any) -> str:
    if get_origin(kind) is Literal:
        return choice_of(get_args(kind), str(value), "see `runner config --trainer-options`")
    return f"use {accepted(TypeAdapter(kind).json_schema())}"


def describe(kind: Any) -> str:
    """Return the name of a type as a user would write it."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    return getattr(kind, "__name__", str(kind).replace("typing.", ""))


def _enumerations(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each class of values, and these as a type."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "ExplicitEnum" for base in node.bases):
            values = [one.value for one in node.body if isinstance(one, ast.Assign)]
            yield node.name, Literal[tuple(ast.literal_eval(value) for value in values)]


def _fields_of(tree: ast.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name in values:
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_"):
                    found[name] = _evaluate(statement.annotation, values)
    return found


def _evaluate(annotation: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the type of an annotation; `Any` if it uses names that are not known.

    Of a value or a text, the text is that of a value.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    chosen = names & values.keys()
    if len(chosen) == 1 and names - chosen <= {"str", "Union"}:
        return values[chosen.pop()]
    if not names <= _TYPES.keys():
        return Any
    return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), {"__builtins__": {}}, _TYPES)
