"""docs/guides/troubleshooting.md knows every exit code, every kind of end, and quotes messages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.errors import ExitCode
from runner.recovery.kinds import FailureKind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_is_explained(code: ExitCode) -> None:
    assert f"\n| {code.value} | " in PAGE


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_end_is_explained(kind: FailureKind) -> None:
    assert f"\n| {kind.value} | " in PAGE


def test_the_messages_are_those_of_the_code() -> None:
    sources = [path.read_text() for package in ("runner", "checkpointing") for path in (ROOT / package).rglob("*.py")]
    # Literals that are continued on the next line are one text.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## By message")[2], re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        # What stands for a value: dots, a single capital, or what is in brackets after a name.
        parts = [part.strip() for part in re.split(r"\(?…\)?|\b[NM]\b|\(pid", message)]
        for part in filter(None, parts):
            assert part in code, (message, part)
