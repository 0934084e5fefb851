"""The checkpoint agent: one process per node that holds snapshots in memory and writes them to storage."""
