"""A Lightning callback that saves, resumes and stops a `Trainer` through a `CheckpointManager`.

    from checkpointing.lightning import ResilientCheckpoint
    trainer = L.Trainer(max_epochs=3, callbacks=[ResilientCheckpoint("checkpoints", save_steps=100)])
    trainer.fit(model, loader)        # resumes from the newest valid checkpoint, if there is one

It works on the state that Lightning hands to any callback; of its internals it uses the progress of the loops, the
values logged so far in an epoch, and the point at which a strategy prepares a loader.
"""

from __future__ import annotations

from checkpointing.lightning.seam import check_libraries

# Before anything imports a name that a version may not have.
check_libraries()

from checkpointing.lightning.callback import ResilientCheckpoint  # noqa: E402

__all__ = ["ResilientCheckpoint"]
