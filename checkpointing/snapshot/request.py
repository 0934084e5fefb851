"""What a snapshot is requested with, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpointing.commit.retention import Retention
from checkpointing.state.samples import Look, Samples

# A small file of a rank: its bytes, or a function that returns them, called during training.
SmallFile = bytes | Callable[[], bytes]


@dataclass(frozen=True)
class SnapshotRequest:
    """A request for a snapshot; see `CheckpointManager.save`.

    Attributes:
        step: Step whose state is saved.
        samples_consumed: Samples drawn by all ranks so far.
        own_files: This rank's own small files, by name.
        shared_files: Small files that are equal on all ranks, by name.
        retention: Which checkpoints to keep after the commit.
        metrics: Metrics of the step, by name.
        wait: Whether to wait for an arena where all are busy.
        commit: Whether to commit the snapshot to storage.
    """

    step: int
    samples_consumed: int
    own_files: Mapping[str, SmallFile]
    shared_files: Mapping[str, SmallFile]
    retention: Retention
    metrics: Mapping[str, float]
    wait: bool
    commit: bool


@dataclass
class PendingSnapshot:
    """A snapshot that is not settled yet.

    Attributes:
        request: What was asked for.
        overlapped: The copy runs during training.
        was_staged: The agent has the snapshot, or will have it; False once it was refused or dropped.
        compute_s: Seconds from the beginning of the next step to its optimizer; None until that step has ended.
        cost_known: Its cost has been measured, or cannot be.
        is_typical: Its cost says something about later ones.
        is_gone: Memory of the state was released before it was copied.
        samples: Samples of the state as it was handed over; None where nothing is copied.
        look: The same before the next optimizer step; None as long as there was none.
    """

    request: SnapshotRequest
    overlapped: bool
    was_staged: bool = True
    compute_s: float | None = None
    cost_known: bool = False
    is_typical: bool = True
    is_gone: bool = False
    samples: Samples | None = None
    look: Look | None = None

    def look_again(self) -> None:
        """Read the samples before an optimizer steps."""
        if self.samples is not None:
            self.look = self.samples.look()
