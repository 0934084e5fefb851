"""Tells the user that checkpoints are kept elsewhere than the script says."""

from __future__ import annotations

from pathlib import Path

from checkpointing.commit.catalog import Catalog
from checkpointing.host.environment import LOCATION_ENV
from checkpointing.storage import LocalStorage


def location_notice(kept: str, own: str) -> str | None:
    """Return the notice, or None where the script's own location is used.

    Args:
        kept: Location that the supervisor, or the user's environment, chose.
        own: Location that the script chose; empty for none.
    """
    if not own or Path(own).absolute() == Path(kept).absolute():
        return None
    text = (
        f"checkpoints are kept at {kept}, not at {own}, as this runs under a supervisor; "
        f"with {LOCATION_ENV}={kept} plain torchrun or python resumes from them, too"
    )
    if Path(own).is_dir() and (steps := Catalog(LocalStorage(Path(own))).committed_steps()):
        text += (
            f". {own} holds checkpoints up to step {steps[-1]}, from which this run does not resume; "
            f"for that, runner start --set checkpoint.location={own}"
        )
    return text
