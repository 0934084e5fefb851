"""Variables by which a supervisor overrides what a script asks its `CheckpointManager` for."""

LOCATION_ENV = "CHECKPOINT_LOCATION"
LOCAL_TIER_ENV = "CHECKPOINT_LOCAL_TIER"
RESUME_ENV = "CHECKPOINT_RESUME"
# Number of parts to cut each micro-batch into, because whole ones ran out of memory; accumulation grows alike.
BATCH_ENV = "CHECKPOINT_MICRO_BATCH_DIVISOR"
# Windows of steps whose samples are skipped: "41-45,60-60".
SKIP_ENV = "CHECKPOINT_SKIP_STEPS"
# "FAILURES:SECONDS" of this run so far, from which `auto` estimates how often it fails.
FAILURES_ENV = "CHECKPOINT_FAILURE_HISTORY"
# A checkpoint to start from while the run has none: this library's, or a stock Trainer's.
RESUME_FROM_ENV = "CHECKPOINT_RESUME_FROM"
# "1" lets a job resume from the checkpoints of a different job.
ALLOW_CHANGES_ENV = "CHECKPOINT_ALLOW_CHANGES"
# Identity of the run, the same on every machine that continues it.
LINEAGE_ENV = "CHECKPOINT_LINEAGE"
