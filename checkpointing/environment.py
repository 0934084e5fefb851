"""Variables by which a supervisor overrides what a script asks its `CheckpointManager` for."""

import os

LOCATION_ENV = "CHECKPOINT_LOCATION"
LOCAL_TIER_ENV = "CHECKPOINT_LOCAL_TIER"
RESUME_ENV = "CHECKPOINT_RESUME"
# Into how many parts each micro-batch is to be cut, because whole ones ran out of memory; accumulation grows alike.
BATCH_ENV = "CHECKPOINT_MICRO_BATCH_DIVISOR"
# Windows of steps whose samples are passed over: "41-45,60-60".
SKIP_ENV = "CHECKPOINT_SKIP_STEPS"
# "FAILURES:SECONDS": what was seen of this run so far; tells `auto` how often it fails.
FAILURES_ENV = "CHECKPOINT_FAILURE_HISTORY"
# A checkpoint to start from while the run has none of its own: ours, or one that a stock Trainer wrote.
RESUME_FROM_ENV = "CHECKPOINT_RESUME_FROM"
# "1": the user says that a job which differs from the one that wrote the checkpoints is to resume from them.
ALLOW_CHANGES_ENV = "CHECKPOINT_ALLOW_CHANGES"
# What the run is called on whatever machine it goes on.
LINEAGE_ENV = "CHECKPOINT_LINEAGE"


def changes_allowed() -> bool:
    """Return whether the user lets a job resume from checkpoints although it differs from the job that wrote them."""
    return os.environ.get(ALLOW_CHANGES_ENV) == "1"
