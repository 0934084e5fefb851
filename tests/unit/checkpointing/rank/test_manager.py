"""What a manager takes in by name or as one value."""

from __future__ import annotations

from pathlib import Path

from checkpointing.rank.manager import CheckpointManager
from checkpointing.retention import Retention


def test_retention_is_one_value_or_its_parts_by_name(tmp_path: Path) -> None:
    """What is added to `Retention` reaches the agent without an option of the manager's own."""
    one = Retention(3, keep_every=50, best_metric="eval_loss", greater_is_better=True)
    assert CheckpointManager(str(tmp_path), keep_last=1, retention=one).retention == one
    assert CheckpointManager(str(tmp_path), keep_last=1, keep_every=2).retention == Retention(1, keep_every=2)
