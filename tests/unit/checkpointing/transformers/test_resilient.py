"""Options that `resilient` refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from checkpointing.errors import CheckpointError
from checkpointing.transformers import _check_trainer, resilient
from checkpointing.transformers.trainer import ResilientMixin


def test_a_transformers_without_the_loops_hooks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained, and failed at the first save."""
    trainer = Trainer(model=torch.nn.Linear(1, 1), args=TrainingArguments(str(tmp_path), report_to="none"))
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(CheckpointError, match=r"transformers \S+ has no Trainer._run_epoch; this was tried with 5.3.0"):
        resilient(trainer)
    assert not isinstance(trainer, ResilientMixin)


def test_a_hook_with_other_arguments_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(model=torch.nn.Linear(1, 1), args=TrainingArguments(str(tmp_path), report_to="none"))
    # A wrapper of somebody's passes on what it is given.
    monkeypatch.setattr(Trainer, "_save_scaler", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(Trainer, "_load_scaler", lambda self, folder, step: None)
    with pytest.raises(CheckpointError, match=r"changed the arguments of Trainer._load_scaler to \(folder, step\)"):
        resilient(trainer)


def test_ranks_that_share_parts_of_samples_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path), report_to="none"))
    try:
        for kind, size in (("context", "cp_size"), ("sequence", "sp_size")):
            trainer.accelerator.state.parallelism_config = SimpleNamespace(**{size: 2})
            with pytest.raises(CheckpointError, match=f"{kind} parallelism is not supported by resilient"):
                resilient(trainer)
    finally:
        trainer.accelerator.state.parallelism_config = None
    # transformers has distributed the experts while it loaded the model.
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(ep_size=2))  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="expert parallelism is not supported by resilient"):
        resilient(trainer)


def test_deepspeed_without_zero_is_refused(tmp_path: Path) -> None:
    trainer: Any = Trainer(model=torch.nn.Linear(1, 1), args=TrainingArguments(str(tmp_path), report_to="none"))
    trainer.is_deepspeed_enabled = True
    plugin = SimpleNamespace(zero_stage=0)
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), parallelism_config=None)
    with pytest.raises(CheckpointError, match="without ZeRO is not supported; set zero_optimization"):
        resilient(trainer)
    for plugin.zero_stage in (1, 2, 3):
        _check_trainer(trainer)
