"""Options that `resilient` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from checkpointing.errors import CheckpointError
from checkpointing.transformers import resilient


def test_a_transformers_without_the_loops_hooks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained, and failed at the first save."""
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(CheckpointError, match="too old for resilient"):
        resilient(Trainer(model=torch.nn.Linear(1, 1), args=TrainingArguments(str(tmp_path), report_to="none")))
