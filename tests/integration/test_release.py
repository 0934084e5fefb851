"""A release: the same bytes twice, and what it contains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The scripts use one environment.
pytestmark = pytest.mark.xdist_group("release")


def run(*command: str, umask: int = 0o022, **environment: str) -> str:
    own = {"RUNNER_VENV": str(Path(sys.executable).parents[1]), **environment}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, umask=umask, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_builds_of_a_commit_are_the_same_bytes(tmp_path: Path) -> None:
    """At other times, with other umasks, time zones, languages and temporary folders."""
    (tmp_path / "elsewhere").mkdir()
    run("scripts/release", str(tmp_path / "a"))
    other = {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "TMPDIR": str(tmp_path / "elsewhere"), "PYTHONHASHSEED": "7"}
    run("scripts/release", str(tmp_path / "b"), umask=0o077, **other)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    stem = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}"
    assert names == ["SHA256SUMS", f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    run("sh", "-c", f"cd {tmp_path / 'b'} && sha256sum --strict --check SHA256SUMS")
    # Nothing of the machine that built it.
    with tarfile.open(tmp_path / "a" / f"{stem}.tar.gz") as archive:
        assert {(member.uid, member.uname) for member in archive} == {(0, "")}
        assert {member.name.partition("/")[0] for member in archive} == {stem}
    with zipfile.ZipFile(tmp_path / "a" / f"{stem}-py3-none-any.whl") as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist()} == {"runner", "checkpointing", f"{stem}.dist-info"}


def test_a_bill_of_materials_lists_an_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    for name in ("a", "b"):
        run("scripts/sbom", str(tmp_path / name), str(tmp_path / "venv" / "bin" / "python"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    bill = json.loads((tmp_path / "a").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == PROJECT["name"]
    pip = next(component for component in bill["components"] if component["name"] == "pip")
    assert pip["purl"] == f"pkg:pypi/pip@{pip['version']}"
