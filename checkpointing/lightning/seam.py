"""Every private name of Lightning and torchmetrics that is used here."""

from __future__ import annotations

import importlib

from checkpointing.host.private_names import PrivateAttribute, PrivateMethod, Seam

_LOOPS = "lightning.pytorch.loops"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_RESTORING = f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector"
_LOGGING = f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector"
_INSTEAD = "use CheckpointManager in a loop of your own"


def _attributes(owner: str, *names: str) -> tuple[PrivateAttribute, ...]:
    return tuple(PrivateAttribute(owner, name) for name in names)


LIGHTNING = Seam(
    "lightning",
    "2.6.0",
    "2.6.6",
    (
        *_attributes("lightning.pytorch:Trainer", "_logger_connector", "_checkpoint_connector", "_signal_connector"),
        # The loops' progress, and the loaders that they draw from.
        *_attributes(f"{_LOOPS}.loop:_Loop", "_restarting"),
        *_attributes(f"{_LOOPS}.fit_loop:_FitLoop", "_data_fetcher", "_combined_loader"),
        *_attributes(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop", "_results"),
        PrivateMethod(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop", "reset"),
        # What is restored in place of a checkpoint of Lightning's own.
        PrivateAttribute(_RESTORING, "_loaded_checkpoint"),
        PrivateMethod(_RESTORING, "restore_training_state"),
        PrivateAttribute(_RESTORING, "resume_start"),
        *_attributes(f"{_CONNECTORS}.signal_connector:_SignalConnector", "received_sigterm"),
        # Values logged since the epoch began.
        *_attributes(_LOGGING, "_first_loop_iter", "_current_fx", "_callback_metrics", "_logged_metrics"),
        *_attributes(f"{_CONNECTORS}.logger_connector.result", "_Metadata", "_ResultMetric", "_Sync"),
    ),
    _INSTEAD,
)
TORCHMETRICS = Seam(
    "torchmetrics",
    "1.9.0",
    "1.9.0",
    _attributes("torchmetrics:Metric", "_update_count", "_computed", "_defaults"),
    _INSTEAD,
)


def check_libraries() -> None:
    """Check the private names that are needed.

    Raises:
        ImportError: Lightning is not installed.
        CheckpointError: A library has changed one; the message names it, and the versions that were tried.
    """
    importlib.import_module("lightning.pytorch")
    LIGHTNING.check()
    TORCHMETRICS.check()
