"""The optional parts of this distribution (the extras of pyproject.toml), and what to say where one is missing."""

from __future__ import annotations

DISTRIBUTION = "resilient-training"


def not_installed(package: str | None, extra: str) -> str:
    """What a user reads where `package`, which belongs to `extra`, cannot be imported."""
    return f"{package} is not installed: pip install '{DISTRIBUTION}[{extra}]'"
