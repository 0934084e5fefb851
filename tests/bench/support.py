"""Runs a benchmark as a user does, at a size at which its figures mean nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def smoke(name: str, folder: Path, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run `scripts/bench/NAME`.

    Args:
        name: Of the benchmark.
        folder: For its JSON file.
        options: Further options.
        code: The exit code that is expected.

    Returns:
        The JSON that it wrote, and its output.
    """
    answer = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / name), "--json", str(answer), *options],
        capture_output=True,
        text=True,
        timeout=900,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return json.loads(answer.read_text()), output


def all_finite(figures: dict[str, Any]) -> bool:
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in figures.values())
