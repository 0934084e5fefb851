"""Lightning's connector while a checkpoint of ours is resumed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch

from checkpointing.lightning.callback import put_restoring_back, replace_restoring, warn_of_draws


class Connector:
    def __init__(self) -> None:
        self._loaded_checkpoint: dict[str, Any] = {"state_dict": 1}

    def resume_start(self, path: str) -> None:
        self._loaded_checkpoint = {"path": path}

    def restore_training_state(self) -> None:
        raise AssertionError


def test_nothing_of_another_checkpoint_is_restored() -> None:
    connector, restore = Connector(), Mock()
    trainer = SimpleNamespace(_checkpoint_connector=connector)
    replace_restoring(trainer, restore)
    connector.resume_start("initial.ckpt")
    assert connector._loaded_checkpoint == {}
    connector.restore_training_state()
    restore.assert_called_once()
    put_restoring_back(trainer)
    connector.resume_start("initial.ckpt")
    assert connector._loaded_checkpoint == {"path": "initial.ckpt"}


class Plain(L.LightningModule):
    pass


class Augmenting(L.LightningModule):
    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        return batch + torch.randn(())


def test_draws_that_are_not_resumed_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "checkpointing"):
        warn_of_draws(Plain())
        assert not caplog.messages
        warn_of_draws(Augmenting())
    (message,) = caplog.messages
    assert "Augmenting draws at random in on_after_batch_transfer" in message
