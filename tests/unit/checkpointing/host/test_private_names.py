"""Private names of other libraries: what the check finds, and that the tables have all that is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.dcp.seam import DCP
from checkpointing.errors import CheckpointError
from checkpointing.host.private_names import PrivateAttribute, PrivateMethod, PrivateName, Seam
from checkpointing.lightning.seam import LIGHTNING, TORCHMETRICS
from checkpointing.manager.registered_objects import REGISTERED
from checkpointing.transformers.seam import ACCELERATE, TRANSFORMERS, TRL

ROOT = Path(__file__).resolve().parents[4]
HERE = "unit.checkpointing.host.test_private_names"
SEAMS = (TRANSFORMERS, ACCELERATE, TRL, LIGHTNING, TORCHMETRICS, REGISTERED, DCP)


class Loop:
    annotated: int

    def __init__(self) -> None:
        self._set = 1

    @property
    def shown(self) -> object:
        return self._of_property  # type: ignore[attr-defined]

    def _run(self, first: int, second: int) -> None:
        """Take two arguments."""

    def _wrapped(self, *args: object, **kwargs: object) -> None:
        """Take all."""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (PrivateMethod(f"{HERE}:Loop", "_run", ("first", "second")), None),
        (
            PrivateMethod(f"{HERE}:Loop", "_run", ("first",)),
            "has changed the arguments of Loop._run to (first, second)",
        ),
        (PrivateMethod(f"{HERE}:Loop", "_wrapped", ("first",)), None),
        (PrivateMethod(f"{HERE}:Loop", "_walk"), "has no Loop._walk"),
        (PrivateMethod(f"{HERE}:Lap", "_run"), "has no Lap._run"),
        (PrivateMethod("no.such.module:Loop", "_run"), "has no Loop._run"),
        (PrivateAttribute(f"{HERE}:Loop", "_set"), None),
        (PrivateAttribute(f"{HERE}:Loop", "_of_property"), None),
        (PrivateAttribute(f"{HERE}:Loop", "annotated"), None),
        (PrivateAttribute(f"{HERE}:Loop", "_other"), "has no Loop._other"),
        (PrivateAttribute(HERE, "SEAMS"), None),
        (PrivateAttribute(HERE, "SEAM"), f"has no {HERE}.SEAM"),
    ],
)
def test_what_has_changed(name: PrivateName, problem: str | None) -> None:
    assert name.problem() == problem


def test_the_error_says_what_to_install() -> None:
    seam = Seam("pytest", "1.0", "2.0", (PrivateAttribute(HERE, "SEAM"),), "do without")
    with pytest.raises(
        CheckpointError, match=r"pytest \S+ has no .*; this was tried with 1.0 to 2.0: install that, or do w"
    ):
        seam.check()


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.library)
def test_the_installed_version_has_all_names(seam: Seam) -> None:
    assert [problem for name in seam.names if (problem := name.problem()) is not None] == []


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.library)
def test_the_versions_are_those_that_the_tests_run_with(seam: Seam) -> None:
    def pinned(file: str) -> str | None:
        found = re.search(rf"^{seam.library}==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
        return found[1] if found is not None else None

    assert seam.newest == pinned("constraints.txt")
    assert seam.oldest == (pinned("tests/requirements-oldest.txt") or seam.newest)


def private_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the private attributes of a trainer and of `super()` that code uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if owner == "super()" or owner.split(".")[-1] in ("trainer", "_trainer", "Trainer", "loop", "connector"):
                yield owner, node.attr


@pytest.mark.parametrize(
    ("package", "seams"), [("transformers", (TRANSFORMERS, TRL)), ("lightning", (LIGHTNING, TORCHMETRICS))]
)
def test_every_private_name_that_is_used_is_in_the_table(package: str, seams: tuple[Seam, ...]) -> None:
    folder = ROOT / "checkpointing" / package
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    ours = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    ours |= {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store)
    }
    known = {name.name for seam in seams for name in seam.names}
    used = {name for tree in trees for owner, name in private_names(tree) if owner == "super()" or name not in ours}
    # Of our own trackers.
    assert used - known - {"_holds"} == set()
