"""The optional parts of this distribution (the extras of pyproject.toml), and the message where one is missing."""

from __future__ import annotations

DISTRIBUTION = "resilient-training"


def not_installed(package: str | None, extra: str) -> str:
    """Return the message for a `package` of the extra `extra` that cannot be imported."""
    return f"{package} is not installed: pip install '{DISTRIBUTION}[{extra}]'"
