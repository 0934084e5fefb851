"""The process that wraps torchrun, and what it is asked to start."""
