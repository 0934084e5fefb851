"""Variables by which a supervisor overrides what a script asks its `CheckpointManager` for."""

LOCATION_ENV = "CHECKPOINT_LOCATION"
RESUME_ENV = "CHECKPOINT_RESUME"
