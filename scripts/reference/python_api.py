"""The Python API, from the docstrings and signatures of its public names, read without importing them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import griffe

from scripts.reference.markdown import code, item, page, paragraphs, wrap
from scripts.reference.source import read_source

# Class → its methods and properties that a training script calls; the others serve `resilient`.
_METHODS = {
    "CheckpointManager": [
        "track",
        "resume",
        "batches",
        "shares",
        "check_exact",
        "step",
        "save",
        "wait_for_commit",
        "stop_wanted",
        "stop",
        "pause",
        "begin_step",
        "report",
        "load_best",
        "close",
    ],
    # Lightning calls its methods.
    "ResilientCheckpoint": [],
}
_MODULES = ["checkpointing", "checkpointing.transformers", "checkpointing.lightning"]
_STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def render() -> str:
    return page("Python API", "docstrings of the package checkpointing", _blocks())


def _blocks() -> Iterator[str]:
    # Names that a docstring explains together are not those of the signature.
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    package = read_source("checkpointing")
    yield wrap(
        "These names are stable. Everything else in `checkpointing` and `runner` may change between versions without "
        "notice."
    )
    for name in _MODULES:
        module: Any = package[name.removeprefix("checkpointing").lstrip(".")] if name != "checkpointing" else package
        yield f"## {name}"
        yield paragraphs(module.docstring.value)
        for public in module.exports or []:
            yield from _object(str(public), module[str(public)])
    yield "## checkpointing.errors"
    yield from _errors(package["errors"])


def _object(name: str, found: Any) -> Iterator[str]:
    found = found.final_target if found.is_alias else found
    yield f"### {name}"
    if not found.is_class:
        yield from _function(name, found)
        return
    constructor = found.members["__init__"]
    if constructor.docstring is None:
        # The class's own describes the arguments.
        yield code(_signature(name, constructor), "python")
        yield from _sections(found.docstring)
    else:
        yield from _function(name, constructor, found.docstring)
    for method in _METHODS[name]:
        assert method in found.all_members, f"{name}.{method} is not there any more: correct _METHODS in {__file__}"
        own = found.all_members[method]
        yield f"#### {name}.{method}"
        yield from _function(f"{name}.{method}", own.final_target if own.is_alias else own)


def _function(name: str, found: Any, summary: Any = None) -> Iterator[str]:
    yield code(_signature(name, found), "python")
    if summary is not None:
        # Attributes are for integrations.
        yield paragraphs(summary.value.split("\n\nAttributes:")[0])
    assert found.docstring is not None, f"{name} needs a docstring"
    yield from _sections(found.docstring)


def _signature(name: str, found: Any) -> str:
    """Format a call with types and defaults, on one line if it fits."""
    if not found.is_function:
        return f"{name}: {found.annotation}"
    parameters = [parameter for parameter in found.parameters if parameter.name != "self"]
    parts, keyword_only = [], False
    for one in parameters:
        if one.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            keyword_only = True
            parts.append("*")
        text = _STARS.get(one.kind, "") + one.name
        if one.annotation is not None:
            text += f": {one.annotation}"
        # griffe gives those with stars an empty one.
        if one.default is not None and one.kind not in _STARS:
            text += f" = {_default(one.default, found)}"
        parts.append(text)
    result = f" -> {found.returns}" if found.returns is not None and found.name != "__init__" else ""
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _default(value: Any, function: Any) -> str:
    """Format a default; a named constant by its value, which says more to a reader than its name."""
    module = function.module
    if isinstance(value, griffe.ExprName) and value.name in module.members:
        constant = module.members[value.name]
        return str((constant.final_target if constant.is_alias else constant).value)
    return str(value).replace("'", '"')


def _sections(docstring: Any) -> Iterator[str]:
    """Yield the text, then one list of the arguments, the result, and the errors."""
    items: list[str] = []
    for section in docstring.parse("google", warnings=False):
        match section.kind.value:
            case "text":
                yield paragraphs(section.value)
            case "parameters" | "attributes":
                items += _parameters(section.value)
            case "returns" | "yields":
                items += [item(f"{section.kind.value.capitalize()}: {_text(one)}") for one in section.value]
            case "raises":
                items += [item(f"Raises `{one.annotation}`: {_text(one)}") for one in section.value]
            case "examples":
                for kind, text in section.value:
                    yield code(text, "python") if kind.value == "examples" else paragraphs(text)
            case kind:
                raise AssertionError(f"a docstring section {kind!r} has no format here")
    yield "\n".join(items)


def _parameters(parameters: Any) -> list[str]:
    """Return a list item for each parameter; those with the same text share one."""
    names: dict[str, list[str]] = {}
    for one in parameters:
        names.setdefault(_text(one), []).append(_quoted(one.name))
    return [item(f"{', '.join(quoted)}: {text}") for text, quoted in names.items()]


def _quoted(names: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def _text(element: Any) -> str:
    return " ".join(element.description.split())


def _errors(module: Any) -> Iterator[str]:
    yield "Exceptions that a training script may meet; all but `Preempted` derive from `CheckpointError`."
    found = [one for one in module.members.values() if not one.is_alias and one.is_class]
    yield "\n".join(item(f"`{one.name}`({', '.join(map(str, one.bases))}): {_first(one)}") for one in found)


def _first(found: Any) -> str:
    assert found.docstring is not None, f"{found.name} needs a docstring"
    return inspect.cleandoc(found.docstring.value).partition("\n\n")[0]
