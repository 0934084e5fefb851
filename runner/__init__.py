"""The control plane: `runner start` keeps a training run going across crashes, preemption and restarts.

Start reading at `cli`, then `supervisor`. Only what runs in a rank, or in its own process, imports torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_OF_NOTEBOOKS = ("RunResult", "start")


def __getattr__(name: str) -> Any:
    """Import what notebooks use when it is asked for: every command imports this package."""
    if name not in _OF_NOTEBOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("runner.notebook"), name)
