"""Variables by which a supervisor overrides what a script asks its `CheckpointManager` for."""

LOCATION_ENV = "CHECKPOINT_LOCATION"
LOCAL_TIER_ENV = "CHECKPOINT_LOCAL_TIER"
RESUME_ENV = "CHECKPOINT_RESUME"
# "FAILURES:SECONDS": what was seen of this run so far; tells `auto` how often it fails.
FAILURES_ENV = "CHECKPOINT_FAILURE_HISTORY"
