"""What a driver asks of a worker, in JSON: one measurement. Needs nothing else, for environments of peers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def order(worker: Path, measurement: str, **arguments: object) -> list[str]:
    """Return the end of a command: the worker's script and its argument."""
    return [str(worker), json.dumps({"measurement": measurement, **arguments}, default=str)]


def carry_out(measurements: Mapping[str, Callable[..., Any]]) -> None:
    """Do what this worker was ordered, and print one line "RESULT {json}", if there is a result."""
    arguments = json.loads(sys.argv[1])
    result = measurements[arguments.pop("measurement")](**arguments)
    if result is not None:
        print("RESULT " + json.dumps(result), flush=True)
