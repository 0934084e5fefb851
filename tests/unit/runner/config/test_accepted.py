from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from runner.config.accepted import accepted, key_at
from runner.config.load import load_config, parse_setting
from runner.config.schema import Config, Section
from runner.errors import UsageError


def keys() -> Iterator[str]:
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from (f"{name}.{inner}" for inner in kind.model_fields)
        else:
            yield name


def refusal(key: str, value: Any) -> str | None:
    section, _, name = key.rpartition(".")
    try:
        Config.model_validate({section: {name: value}} if section else {name: value})
    except ValidationError:
        with pytest.raises(UsageError) as caught:
            load_config(None, {}, [("model.name_or_path", "org/model", ""), (key, value, f"--set {key}=…")])
        return str(caught.value)
    return None


@pytest.mark.parametrize("key", sorted(keys()))
def test_all_that_a_key_accepts_is_said_where_it_is_refused(key: str) -> None:
    """Of a key with several kinds of values, only the first kind was named."""
    refused = [
        text for value in ("soon", {"a": 1}, [[1]], -1, 10**9 + 0.5) if (text := refusal(key, value)) is not None
    ]
    assert refused
    _, schema = key_at(key.split("."))
    said = accepted(schema)
    kinds = schema.get("anyOf", [schema])
    for kind in kinds:
        values = kind.get("enum", [kind["const"]] if "const" in kind else [])
        assert all(re.search(rf"\b{value}\b", said) for value in values), said
        bound = kind.get("minimum", kind.get("exclusiveMinimum"))
        assert bound is None or f"{bound:g}" in said
    assert ("null" in said) == any(kind.get("type") == "null" for kind in kinds)
    assert any(f"use {said}" in text for text in refused), refused


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("checkpoint.save_steps", "auto or null"),
        ("checkpoint.snapshot_steps", "auto, a whole number from 1 or null"),
        ("launch.nproc_per_node", "auto, gpu or a whole number from 1"),
        ("launch.nnodes", "a whole number from 1 or a text such as 2:4"),
        ("strategy", "ddp, fsdp, fsdp_all_nodes, deepspeed or a mapping with the keys tp, dp_shard"),
        ("checkpoint.overhead_cap", "a number above 0 to 1"),
        ("restart.hang_timeout_s", "a finite number above 0 or null"),
        ("trainer", "a mapping of names to values"),
        ("output_dir", "a text that is not empty"),
    ],
)
def test_words(key: str, said: str) -> None:
    assert accepted(key_at(key.split("."))[1]) == said


def test_a_place_within_a_value_belongs_to_its_key() -> None:
    assert key_at(["method", "target_modules", "list[str]", 0])[0] == "method.target_modules"
    assert key_at(["strategy", "MeshConfig", "tp"])[0] == "strategy.tp"
    with pytest.raises(UsageError, match=r"unknown key strategy\.pp \(value 2\); use one of tp, dp_shard$"):
        load_config(None, {}, [parse_setting("strategy={pp: 2}")])
    with pytest.raises(UsageError, match=r"unknown key launch\.nproc_per_nod \(value 2\); did you mean nproc_per_node"):
        load_config(None, {}, [parse_setting("launch.nproc_per_nod=2")])
