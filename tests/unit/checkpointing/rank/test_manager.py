"""What a manager accepts by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointing.rank.manager import CheckpointManager
from checkpointing.retention import Retention


def test_retention_options_reach_the_agent_by_name(tmp_path: Path) -> None:
    """What is added to `Retention` needs no option of the manager's own."""
    manager = CheckpointManager(
        str(tmp_path), keep_last=3, keep_every=50, best_metric="eval_loss", greater_is_better=True
    )
    assert manager.retention == Retention(3, keep_every=50, best_metric="eval_loss", greater_is_better=True)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    misspelt: dict[str, Any] = {"keep_lats": 3}
    with pytest.raises(TypeError, match="keep_lats"):
        CheckpointManager(str(tmp_path), **misspelt)
