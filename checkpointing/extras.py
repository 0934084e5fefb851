"""The optional parts of this distribution (the extras of pyproject.toml), and what to say where one is missing."""

from __future__ import annotations

DISTRIBUTION = "resilient-training"


def how_to_install(extra: str) -> str:
    """The command that installs an extra, e.g. `s3`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def not_installed(package: str | None, extra: str) -> str:
    """What a user reads where `package`, which belongs to `extra`, cannot be imported."""
    return f"{package} is not installed: {how_to_install(extra)}"
