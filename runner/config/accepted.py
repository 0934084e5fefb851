"""What a key of the configuration accepts, in words, from the schema that editors check it by."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.schema import JOB_SCHEMA

_KINDS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list of texts",
    "object": "a mapping of names to values",
    "null": "null",
}
# A longer list of keys helps nobody.
_SHOWN_KEYS = 8
_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def key_at(location: Sequence[str | int]) -> tuple[str, Mapping[str, Any]]:
    """Return the key that a place within a configuration belongs to, and its schema.

    Args:
        location: Names from the top; those of types, and places within a value, are left out of the key.
    """
    schema, names = _schema(), list[str]()
    for part in location:
        # Of a key that may be a name or a section, the section has keys.
        found: Mapping[str, Any] = next(
            (one["properties"] for one in (schema, *schema.get("anyOf", ())) if "properties" in one), {}
        )
        if part in found:
            names.append(str(part))
            schema = found[str(part)]
    return ".".join(names), schema


def accepted(schema: Mapping[str, Any]) -> str:
    """Return what a key accepts: `auto, null or a whole number from 1`."""
    texts = list(dict.fromkeys(text for one in schema.get("anyOf", (schema,)) for text in _texts(one)))
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _texts(schema: Mapping[str, Any]) -> list[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return [str(value) for value in values]
    if "enum" in schema.get("items", ()):
        return [f"a list of {accepted(schema['items'])}"]
    if 0 < len(schema.get("properties", ())) <= _SHOWN_KEYS:
        return [f"a mapping with the keys {', '.join(schema['properties'])}"]
    if "pattern" in schema:
        return [f"a text such as {schema['examples'][0]}" if "examples" in schema else "a text that is not empty"]
    bounds = [f"{word} {schema[name]:g}" for name, word in _BOUNDS.items() if name in schema]
    is_open = schema["type"] == "number" and not {"maximum", "exclusiveMaximum"} & schema.keys()
    return [" ".join(["a finite number" if is_open else _KINDS[schema["type"]], *bounds])]


@functools.cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(JOB_SCHEMA.read_text(encoding="utf-8"))
    return schema
