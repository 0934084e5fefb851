"""The configuration keys, from the JSON schema that the pydantic models give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from runner.config import trainer_options
from runner.config.load import CONFIG_VARIABLES
from scripts.reference.job_schema import sections
from scripts.reference.markdown import code, item, page, table, wrap

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def render() -> str:
    return page("Configuration", "runner/config/schema.py", _blocks())


def _blocks() -> Iterator[str]:
    yield wrap(
        "`runner init` writes a commented configuration file, `runner start --config FILE` uses it, and "
        "`runner config` prints the resolved configuration. Later sources override earlier ones: defaults, the YAML "
        "file, environment variables, command line (`--set KEY=VALUE`). An unknown key is an error."
    )
    yield wrap(
        "Editors that support the YAML language server complete and check the keys if the file begins with a line that "
        "names the JSON schema [job.schema.json](../../runner/config/job.schema.json), as a file written by "
        "`runner init` does:"
    )
    yield code("# yaml-language-server: $schema=PATH/job.schema.json", "yaml")
    top = sections()
    yield "## Top level"
    yield "\n".join(_key(name, schema) for name, schema in top.items() if "properties" not in schema)
    for name, schema in top.items():
        if name == "trainer":
            yield from _trainer(schema)
        elif "properties" in schema:
            yield f"## {name}"
            yield wrap(schema["description"])
            yield "\n".join(_key(f"{name}.{key}", child) for key, child in schema["properties"].items())
    yield "## Environment variables"
    yield wrap(
        "A variable that is set and not empty overrides its key in the YAML file. Of several variables for the same "
        "key the last one counts. Other variables (NCCL_*, TORCH_*, CUDA_*, HF_*, OMP_NUM_THREADS, "
        "GLOO_SOCKET_IFNAME) are passed on to the ranks."
    )
    yield table(["key", "variables"], _variables())


def _variables() -> list[list[str]]:
    of_keys: dict[str, list[str]] = {}
    for variable, key in CONFIG_VARIABLES.items():
        of_keys.setdefault(key, []).append(f"`{variable}`")
    return [[f"`{key}`", ", ".join(variables)] for key, variables in of_keys.items()]


def _key(name: str, schema: dict[str, Any]) -> str:
    facts = [_kind(schema)]
    if "default" in schema:
        facts.append(f"default `{_yaml(schema['default'])}`")
    if "examples" in schema:
        facts.append(f"for example `{_yaml(schema['examples'][0])}`")
    return item(f"`{name}` ({', '.join(facts)}): {schema['description']}")


def _trainer(schema: dict[str, Any]) -> Iterator[str]:
    yield "## trainer"
    yield wrap(schema["description"])
    yield wrap(
        "The options are those of the installed versions of transformers and TRL. `runner start` scales "
        "`learning_rate` by the number of ranks (see `scale_learning_rate`). The runner sets some options itself and "
        "refuses them here:"
    )
    yield table(["option", "instead"], ([f"`{name}`", why] for name, why in trainer_options.RESERVED.items()))


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(child) for child in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "null":
            return "`null`"
        case "array":
            return f"list of {_kind(schema['items'])}s"
        case "object":
            return "mapping"
        case kind:
            bounds = " and ".join(f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema)
            return f"{kind} {bounds}".rstrip()


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
