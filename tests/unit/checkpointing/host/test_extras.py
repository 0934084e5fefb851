"""What users are asked to install is what pyproject.toml offers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from checkpointing.host.environment import DISTRIBUTION, not_installed

ROOT = Path(__file__).parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_message_names_the_package_and_the_command_that_installs_it() -> None:
    assert not_installed("boto3", "s3") == "boto3 is not installed: pip install 'resilient-training[s3]'"
    assert PROJECT["name"] == DISTRIBUTION


def test_every_extra_that_is_named_in_the_code_exists() -> None:
    sources = [path.read_text() for package in ("checkpointing", "runner") for path in (ROOT / package).rglob("*.py")]
    named = {extra for text in sources for extra in re.findall(r'not_installed\([^)]*, "([\w-]+)"\)', text)}
    assert named and named <= set(PROJECT["optional-dependencies"])
