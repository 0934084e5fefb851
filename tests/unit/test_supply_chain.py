"""What others could change without a commit here: packages, actions of CI, links to other hosts in what we print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
# Name, version, and what follows.
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)(.*)$", re.MULTILINE)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, tuple[str, str]]:
    """Return version and rest of each requirement."""
    return {normalised(found[1]): (found[2], found[3]) for found in PIN.finditer(text.replace("\\\n", " "))}


CONSTRAINTS = {name: version for name, (version, _) in pins((ROOT / "constraints.txt").read_text()).items()}


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_requirement_has_the_hashes_of_its_files(path: Path) -> None:
    text = path.read_text()
    found = pins(text)
    assert len(found) > 50
    for name, (_, rest) in found.items():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", rest), name
    # Nothing else is in the file: no option, no URL, no requirement without a version.
    assert not PIN.sub("", re.sub(r"^#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)).strip()


def test_the_versions_are_those_that_are_tested() -> None:
    """`scripts/lock` was run after the last change of constraints.txt."""
    locked: dict[str, str] = {}
    for path in REQUIREMENTS:
        for name, (version, _) in pins(path.read_text()).items():
            assert locked.setdefault(name, version) == version, name
    assert {name: locked.get(name) for name in CONSTRAINTS} == CONSTRAINTS


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_commit(path: Path) -> None:
    lines = re.findall(r"uses:\s*(.*)", path.read_text())
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_pull_request_gets_no_secrets(path: Path) -> None:
    """Its code runs in CI: without a token that can write, and without one that is left on the disk."""
    workflow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads "on" as true.
    assert "pull_request_target" not in workflow[True] and "workflow_run" not in workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    assert "secrets." not in path.read_text()
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_text_of_a_stranger_becomes_a_command(path: Path) -> None:
    """A title or a branch of a pull request, put into a script by ${{ }}, would be run."""
    assert not [step for step in steps(path) if "${{" in step.get("run", "")]


def test_the_image_is_installed_by_hashes() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "--require-hashes --requirement image.txt" in text and "requirements/image.txt ./" in text
    assert "!requirements/image.txt" in (ROOT / ".dockerignore").read_text().splitlines()
