"""The word list check: it finds what it should, and nothing in plain English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "words"


def words(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        "Whoever starts it again",
        "what to mend",
        "the job begins anew",
        "the user is told",
        "it goes on from step 5",
        "the run in peace",
        "be it a file",
        "where checkpoints lie in storage",
        "Where the machines meet.",
        "beside the checkpoints",
        "24 GB can be had",
        "that is no file",
        "steps to be computed again",
    ],
)
def test_each_is_found_with_its_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"A title\n\n{text}\n")
    done = words(str(file))
    assert done.returncode == 1 and f"{file}:3: " in done.stdout and "write: " in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "recommendation, amend, besides, belied",
        "There is no file, and the run is no longer active.",
        "It lies about its commits and goes on to the next step.",
        "The table at peacetime; the alphabet is in order.",
        "test_what_is_told",
    ],
)
def test_plain_english_is_not(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    done = words(str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("text", ["# it was set\n    # aside\n", "it was set\naside\n"])
def test_a_phrase_is_found_across_the_end_of_a_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"\n{text}")
    assert words(str(file)).stdout == f"{file}:2: 'set aside'; write: quarantine\n"


def test_only_text_of_known_kinds_is_checked(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_text("anew")
    (tmp_path / "data").write_text("anew")
    assert words(str(tmp_path)).returncode == 0
    (tmp_path / "script").write_text("#!/bin/sh\n# anew\n")
    (tmp_path / "job.yaml").write_text("# anew\n")
    assert sorted(line.split(": ")[0] for line in words(str(tmp_path)).stdout.splitlines()) == [
        f"{tmp_path / 'job.yaml'}:1",
        f"{tmp_path / 'script'}:2",
    ]


def test_files_of_the_list_of_exceptions_are_left_out() -> None:
    assert words(str(SCRIPT), str(Path(__file__)), str(SCRIPT.parents[1] / "CHANGELOG.md")).returncode == 0
