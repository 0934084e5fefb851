"""docs/design/threat-model.md: each line names tests, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design" / "threat-model.md").read_text()
COLUMNS = ["he may try", "what defends", "what is left", "tests"]
# unit/test_names.py::test_one, or ::test_two of the file before it.
NAMED = re.compile(r"`([\w/.]*)::(test_\w+)`")


def rows() -> list[list[str]]:
    """The cells of each line of the tables of attackers."""
    found, is_table = [], False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells == COLUMNS:
            is_table = True
        elif not cells:
            is_table = False
        elif is_table and set(cells[0]) != {"-"} and not re.fullmatch(r"-+(\|-+)*", cells[0]):
            found.append(cells)
    return found


ROWS = rows()


def named(text: str) -> list[tuple[str, str]]:
    """Path below tests/, and name, of each test that a text names."""
    path, found = "", []
    for own, name in NAMED.findall(text):
        path = own or path
        found.append((path, name))
    return found


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def expected_to_fail(path: str) -> set[str]:
    """Tests of a file that are marked as failing."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if any("xfail" in ast.unparse(mark) for mark in one.decorator_list)}


def test_there_is_a_table_for_each_attacker() -> None:
    headings = re.findall(r"^### (.*)", PAGE, re.MULTILINE)
    assert len(headings) == 5 and PAGE.count(f"| {' | '.join(COLUMNS)} |") == len(headings)
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_line_is_proved(row: list[str]) -> None:
    assert len(row) == len(COLUMNS)
    tests = named(row[-1])
    assert tests, "no test"
    assert len(tests) == row[-1].count("::")
    for path, name in tests:
        assert name in names_in(path), f"{path}::{name}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_what_does_not_hold_is_said(row: list[str]) -> None:
    """A line whose test is expected to fail says **open**, and no other one does."""
    fails = any(name in expected_to_fail(path) for path, name in named(row[-1]))
    assert fails is ("**open**" in row[2])


def test_no_test_of_a_stranger_is_left_out() -> None:
    files = ["integration/test_strangers.py", "contract/test_forged_pickles.py", "unit/runner/ui/test_metrics_port.py"]
    files += ["unit/test_supply_chain.py", "unit/runner/session/test_private_folder.py"]
    files += ["unit/checkpointing/host/test_own_files.py", "unit/runner/peers/test_auth.py"]
    known = {name for row in ROWS for _, name in named(row[-1])}
    missing = {name for path in files for name in names_in(path) if name.startswith("test_")} - known
    # Of the protocol and of our own files, what is no defence.
    assert missing <= {
        "test_two_that_know_the_secret_exchange_lines",
        "test_a_damaged_one_is_replaced",
        "test_a_lock_of_ours_is_no_link",
    }
