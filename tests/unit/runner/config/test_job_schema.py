"""The JSON schema that editors check a configuration by accepts what `load_config` accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from runner.config.schema import DEFAULT_CONFIG, JOB_SCHEMA, Config

ROOT = Path(__file__).parents[4]
SCHEMA = json.loads(JOB_SCHEMA.read_text())


def problems(document: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(document)]


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in schema.get("properties", {}).items():
        yield name, child
        for inner, grandchild in child.get("properties", {}).items() if name != "trainer" else ():
            yield f"{name}.{inner}", grandchild


def test_it_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "path", [DEFAULT_CONFIG, *(ROOT / "deploy" / "configs").glob("*.yaml")], ids=lambda path: path.stem
)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert problems(yaml.safe_load(path.read_text())) == []


def test_the_resolved_configuration_is_valid() -> None:
    assert problems(yaml.safe_load(Config().to_yaml())) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("outptu_dir: x", "outptu_dir"),
        ("model: {nme: x}", "nme"),
        ("trainer: {lerning_rate: 1}", "lerning_rate"),
        ("trainer: {output_dir: x}", "output_dir"),
        ("trainer: {seed: many}", "many"),
        ("launch: {nnodes: 0}", "0"),
        ("strategy: pipeline", "pipeline"),
        ("restart: {preemption_notices: ibm}", "ibm"),
    ],
)
def test_mistakes_are_marked(text: str, part: str) -> None:
    assert any(part in problem for problem in problems(yaml.safe_load(text)))


@pytest.mark.parametrize(
    ("name", "schema"), list(properties(SCHEMA)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_has_a_description_and_valid_examples(name: str, schema: dict[str, Any]) -> None:
    text = schema.get("description", "")
    assert text[:1].isupper() and text.endswith("."), (
        f"{name} needs a description: a docstring in runner/config/schema.py"
    )
    for value in [*schema.get("examples", []), *([schema["default"]] if "default" in schema else [])]:
        jsonschema.validate(value, schema)
