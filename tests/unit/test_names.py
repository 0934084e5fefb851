"""Every module and every class of the two packages has a name of its own."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What each of several packages has: its options, its side of a protocol, its part for an integration.
ROLES = {"__init__", "__main__", "callback", "data", "errors", "events", "loop_state", "messages", "options"}
ROLES |= {"protocol", "seam"}


def sources() -> list[Path]:
    return [path for package in ("runner", "checkpointing") for path in (ROOT / package).rglob("*.py")]


def test_no_module_name_is_used_twice() -> None:
    names = Counter(path.stem for path in sources())
    assert [name for name, count in names.items() if count > 1 and name not in ROLES] == []


def test_no_class_name_is_used_twice() -> None:
    trees = (ast.parse(path.read_text()) for path in sources())
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []
