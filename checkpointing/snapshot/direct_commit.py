"""Commits a state straight to storage, where there is no memory for a snapshot."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from checkpointing.agent.client import AgentClient
from checkpointing.agent.events import CommitFailedEvent, Committed
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import FileImage, pieces
from checkpointing.format.digest import RunningDigest, digesting
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.process.device import Device
from checkpointing.snapshot.request import SnapshotRequest

_WINDOW_BYTES = 32 * 1024 * 1024


class DirectCommit:
    """Writes checkpoints from rank 0 while the optimizer waits.

    Args:
        client: The connection to the agent, which publishes the outcome and prunes old checkpoints.
        tiers: Where checkpoints are kept.
        world_size: Number of ranks.

    Attributes:
        error: Why the last commit failed; None after success.
        step: Newest step that was committed; -1 before the first.
    """

    def __init__(self, client: AgentClient, tiers: Tiers, world_size: int) -> None:
        self._client, self._tiers, self._world_size = client, tiers, world_size
        self.error: str | None = None
        self.step = -1

    def commit(self, request: SnapshotRequest, images: Sequence[FileImage], device: Device) -> None:
        """Write the files, publish the outcome, and have old checkpoints pruned; a failure is kept in `error`."""
        began = time.monotonic()
        self.error, nbytes = self._write(request, images, device)
        step, tier = request.step, self._tiers.name(self._tiers.first)
        if self.error is not None:
            self._client.announce(CommitFailedEvent(step=step, tier=tier, error=self.error))
            return
        self.step = step
        duration = round(time.monotonic() - began, 4)
        self._client.announce(Committed(step=step, tier=tier, nbytes=nbytes, duration_s=duration, cpu_s=duration))
        self._client.prune(request.retention)

    def _write(self, request: SnapshotRequest, images: Sequence[FileImage], device: Device) -> tuple[str | None, int]:
        """Return why the files could not be committed, or None, and how many bytes were."""
        if any(image.own for image in images):
            return (
                "there is no memory for a snapshot, and no rank holds all of the sharded state: set a larger "
                "checkpoint.memory_limit"
            ), 0
        client = self._client
        info = SnapshotInfo(
            client.run_id, client.attempt, request.step, self._world_size, request.samples_consumed, request.metrics
        )
        window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        files = []
        for image in images:
            digest = RunningDigest()
            data = digesting(pieces(image, window, device), digest)
            files.append(StagedFile(image.name, data, digest.result, image.nbytes))
        try:
            return None, commit_snapshot(self._tiers.first, info, files).total_bytes
        except CheckpointError as error:
            return str(error), 0
