"""What the machine gives: memory, threads, locks, clocks and the environment; no torch."""
