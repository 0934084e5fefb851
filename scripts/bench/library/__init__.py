"""What the benchmarks share; `docs/benchmarks` has their results."""

from __future__ import annotations

import sys
from pathlib import Path

# The tests' own starters: benchmarks, too, need nothing but this repository.
sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))
