"""Custom resources checked offline against the published definitions in `crd/`; unknown fields are errors.

`crd/pytorchjobs.yaml` is that of the Kubeflow training operator, `crd/trainjobs.yaml` that of Kubeflow Trainer.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

FOLDER = Path(__file__).with_name("crd")


def problems(resource: dict[str, Any], definition: str) -> list[str]:
    """Where a resource does not follow a definition; an empty list if it does.

    Args:
        resource: the object, as read from its manifest.
        definition: the name of a file in `crd/`.
    """
    published = yaml.safe_load((FOLDER / definition).read_text())
    version = resource["apiVersion"].rpartition("/")[2]
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in published["spec"]["versions"] if one["name"] == version]
    schema = _strict(copy.deepcopy(schema))
    # A definition says nothing of metadata, which is the same for all objects.
    schema["properties"]["metadata"] = {"type": "object"}
    errors = Draft202012Validator(schema).iter_errors(resource)
    return [f"{'/'.join(map(str, error.path)) or '(top)'}: {error.message}" for error in errors]


def _strict(schema: Any) -> Any:
    """The same schema in plain JSON Schema, without room for unknown fields."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if strict.get("x-kubernetes-int-or-string"):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    named = isinstance(strict.get("properties"), dict)
    is_open = strict.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in strict
    if named and not is_open:
        strict["additionalProperties"] = False
    return strict
