"""Runs made by an earlier version: `tests/data/bf31646`."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "bf31646"
ANSWERS: dict[str, dict[str, dict[str, Any]]] = json.loads((DATA / "answers.json").read_text())


def unpack(folder: Path) -> Path:
    """Unpack the runs `preempted` and `failed` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(DATA / "runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
