"""What `runner start` does, from a resolved configuration to the exit code."""
