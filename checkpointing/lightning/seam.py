"""Every private name of Lightning and torchmetrics that is used here."""

from __future__ import annotations

import importlib

from checkpointing.host.private_names import PrivateAttribute, PrivateMethod, Seam

_LOOPS = "lightning.pytorch.loops"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_INSTEAD = "use CheckpointManager in a loop of your own"

LIGHTNING = Seam(
    "lightning",
    "2.6.0",
    "2.6.6",
    (
        *(
            PrivateAttribute("lightning.pytorch:Trainer", name)
            for name in ("_logger_connector", "_checkpoint_connector", "_signal_connector")
        ),
        # The loops' progress, and the loaders that they draw from.
        PrivateAttribute(f"{_LOOPS}.loop:_Loop", "_restarting"),
        PrivateAttribute(f"{_LOOPS}.fit_loop:_FitLoop", "_data_fetcher"),
        PrivateAttribute(f"{_LOOPS}.fit_loop:_FitLoop", "_combined_loader"),
        PrivateAttribute(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop", "_results"),
        PrivateMethod(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop", "reset"),
        # What is restored in place of a checkpoint of Lightning's own.
        PrivateAttribute(f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector", "_loaded_checkpoint"),
        PrivateMethod(f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector", "restore_training_state"),
        PrivateAttribute(f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector", "resume_start"),
        PrivateAttribute(f"{_CONNECTORS}.signal_connector:_SignalConnector", "received_sigterm"),
        # Values logged since the epoch began.
        *(
            PrivateAttribute(f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector", name)
            for name in ("_first_loop_iter", "_current_fx", "_callback_metrics", "_logged_metrics")
        ),
        *(
            PrivateAttribute(f"{_CONNECTORS}.logger_connector.result", name)
            for name in ("_Metadata", "_ResultMetric", "_Sync")
        ),
    ),
    _INSTEAD,
)
TORCHMETRICS = Seam(
    "torchmetrics",
    "1.9.0",
    "1.9.0",
    (
        PrivateAttribute("torchmetrics:Metric", "_update_count"),
        PrivateAttribute("torchmetrics:Metric", "_computed"),
        PrivateAttribute("torchmetrics:Metric", "_defaults"),
    ),
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
