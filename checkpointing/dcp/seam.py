"""Every private name of `torch.distributed.checkpoint` that is used here."""

from __future__ import annotations

from checkpointing.host.private_names import PrivateAttribute, PrivateMethod, Seam

_FILES = "torch.distributed.checkpoint.filesystem"
_SAVING = "torch.distributed.checkpoint.state_dict_saver"
_LOADING = "torch.distributed.checkpoint.state_dict_loader"

DCP = Seam(
    "torch",
    "2.8.0",
    "2.13.0",
    (
        # Called by `save`, `async_save` and `load`, under whatever name a program has imported these.
        PrivateAttribute(_SAVING, "_save_state_dict"),
        PrivateAttribute(_LOADING, "_load_state_dict"),
        # Files of the ranks, and how they are named.
        PrivateAttribute(_FILES, "_FileSystemWriter"),
        PrivateAttribute(_FILES, "_StoragePrefix"),
        PrivateMethod(f"{_FILES}:_FileSystemWriter", "write_data", ("plan", "planner")),
        PrivateMethod(f"{_FILES}:_FileSystemWriter", "finish", ("metadata", "results")),
        PrivateAttribute(f"{_FILES}:_FileSystemWriter", "fs"),
        PrivateAttribute(f"{_FILES}:_FileSystemWriter", "path"),
        PrivateAttribute(f"{_FILES}:_FileSystemWriter", "sync_files"),
        PrivateAttribute(f"{_FILES}:FileSystemReader", "fs"),
        PrivateAttribute(f"{_FILES}:FileSystemReader", "path"),
    ),
    "call protect() of checkpointing.dcp no longer",
)
# What `async_save` copies with; where one of these is missing, the copy is torch's.
_COPYING = "torch.distributed.checkpoint._state_dict_stager:StateDictStager"
STAGING = (
    PrivateMethod(_COPYING, "_stage_untyped_storage", ("storage", "non_blocking")),
    PrivateAttribute(_COPYING, "_cached_storage_mapping"),
    PrivateAttribute("torch.distributed.checkpoint.staging:DefaultStager", "_config"),
    PrivateAttribute(_SAVING, "_ThreadBasedAsyncCheckpointExecutor"),
    PrivateAttribute(_SAVING, "_ProcessBasedAsyncCheckpointExecutor"),
)
