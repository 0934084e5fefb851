"""Which node leads a run: how it takes the lease, keeps it, and is replaced."""
