"""Checkpoints that training hardly notices and no crash can tear.

`CheckpointManager` is for a bare PyTorch loop, `checkpointing.transformers.resilient` for any Hugging Face trainer.
The modules that the agent and the control plane use (storage, commit, catalog, agent) import no torch; hence the
manager is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointing.manager.manager import CheckpointManager

__all__ = ["CheckpointManager"]


def __getattr__(name: str) -> Any:
    if name == "CheckpointManager":
        from checkpointing.manager.manager import CheckpointManager

        return CheckpointManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
