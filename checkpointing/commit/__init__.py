"""How checkpoints come into being, are found, read, kept and removed, in any storage."""
