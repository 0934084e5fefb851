"""Which checkpoint all ranks resume from, and how they read it."""
