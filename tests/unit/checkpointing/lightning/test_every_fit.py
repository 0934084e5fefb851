"""Every Lightning Trainer gets the callback when it begins to fit, unless the script has given it one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from checkpointing.lightning import ResilientCheckpoint
from checkpointing.lightning.every_fit import protect_trainers

# Of machines, not of what is tested.
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def protected() -> Iterator[None]:
    fit = pl.Trainer.fit
    protect_trainers()
    yield
    pl.Trainer.fit = fit  # type: ignore[method-assign]


def trained(folder: Path, *callbacks: pl.Callback) -> Any:
    trainer: Any = pl.Trainer(
        default_root_dir=folder, max_steps=3, accelerator="cpu", logger=False, callbacks=list(callbacks),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows: Any = torch.ones(8, 2)
    trainer.fit(Module(), DataLoader(rows))
    return trainer


def test_a_trainer_without_the_callback_gets_one(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    assert sum(isinstance(callback, ResilientCheckpoint) for callback in trainer.callbacks) == 1
    assert (tmp_path / "checkpoints" / "checkpoint-3" / "manifest.json").exists()


def test_the_scripts_own_is_kept(tmp_path: Path) -> None:
    own = ResilientCheckpoint(tmp_path / "mine", save_steps=2)
    trainer = trained(tmp_path, own)
    assert [callback for callback in trainer.callbacks if isinstance(callback, ResilientCheckpoint)] == [own]
    assert (tmp_path / "mine" / "checkpoint-2").exists() and not (tmp_path / "checkpoints").exists()
