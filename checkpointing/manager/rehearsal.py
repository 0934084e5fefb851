"""What a training does in a rehearsal (`runner rehearse`): the first steps of the user's job, saved often."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from checkpointing.host.environment import REHEARSAL_ENV


@dataclass(frozen=True)
class Rehearsal:
    """How short a rehearsal is.

    Attributes:
        steps: Steps after which training ends, at that step's commit.
        save_steps: Steps between two commits.
        output_dir: Folder for what the job writes next to its checkpoints, in place of its own.
        snapshot_steps: Steps between two snapshots in memory.
    """

    steps: int
    save_steps: int
    output_dir: str
    snapshot_steps: int = 2


def rehearsal(environment: Mapping[str, str] = os.environ) -> Rehearsal | None:
    """Return the rehearsal that this process takes part in; None for real training."""
    text = environment.get(REHEARSAL_ENV)
    if not text:
        return None
    steps, save_steps, output_dir = text.split(":", 2)
    return Rehearsal(int(steps), int(save_steps), output_dir)


def ends_rehearsal(step: int) -> bool:
    """Return whether a step is the last one of a rehearsal; never in real training."""
    short = rehearsal()
    return short is not None and step >= short.steps


class RehearsalOver(SystemExit):
    """Ends a rank after the last step of a rehearsal, so that nothing of the script runs that follows its training."""

    def __init__(self) -> None:
        super().__init__(0)
