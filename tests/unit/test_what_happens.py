"""docs/guides/what-happens-when.md quotes messages that the code has; tests/integration plays some of its sections."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "what-happens-when.md"
# What the runner says, but for its progress.
MESSAGE = re.compile(
    r"^(?:\[ *[\d.]+s\] |runner: |NonFinite: |CommitFailed: )(?!committed \d+$)(?!.* · )(.+)$", re.MULTILINE
)
# Paths, numbers and digests, what a value may be, what the script itself says, and where one text may meet another.
VALUES = re.compile(
    r"/home/me/\S*|\S*\d\S*|[();:]|\.(?= )|sample 1337 has no label|'inputs'|CUDA out of memory|Tried to allocate"
    r"|\b(SIGKILL|SIGINT|training|auto|local|preempted|micro-batch|the gradients|are|nothing|model\.safetensors"
    r"|No space left on device|ValueError|OutOfMemoryError|KeyError|CommitFailed|NonFinite)\b"
)


def literals(path: Path) -> Iterator[str]:
    """The texts of a module, with a mark in place of each value; docstrings are none of them."""
    tree = ast.parse(path.read_text())
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node.value


CODE = "\n".join(
    text
    for package in ("runner", "checkpointing")
    for path in (ROOT / package).rglob("*.py")
    for text in literals(path)
)
MESSAGES = sorted(set(MESSAGE.findall(PAGE.read_text())))


def unknown(message: str) -> list[str]:
    """The words of a message that are in no three words in a row of the code, or fewer between two values."""
    words = []
    for between in VALUES.sub("\0", message).split("\0"):
        part = between.split()
        length = min(3, len(part))
        runs = [range(at, at + length) for at in range(len(part) - length + 1)]
        known = {place for run in runs if " ".join(part[at] for at in run) in CODE for place in run}
        words += [word for at, word in enumerate(part) if at not in known and re.search("[a-z]{2}", word)]
    return words


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_in_the_code(message: str) -> None:
    assert unknown(message) == []


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("step 7: rank 0 was killed by SIGKILL; restarting", []),
        ("no pulse for 3.0 s after step 42 (training); the limit is 3.0 s", ["no", "pulse", "for"]),
    ],
)
def test_what_the_code_lacks_is_found(message: str, found: list[str]) -> None:
    assert unknown(message) == found
