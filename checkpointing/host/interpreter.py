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
    return [sys.executable, *([] if _is_here() else ["-P"]), "-m", name, *arguments]


def _is_here() -> bool:
    try:
        return Path.cwd() == _ROOT
    except OSError:
        # It was removed under this process.
        return False
