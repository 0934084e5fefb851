"""How a module of this project is run in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this project in this Python.

    `python -m` imports from the working directory first, which is the user's, or everybody's: a file `psutil.py` there
    would be run in the place of the library. The option `-P` leaves that directory out, unless this project is in it.
    """
    safe = [] if Path.cwd() == _ROOT else ["-P"]
    return [sys.executable, *safe, "-m", name, *arguments]
