"""One node's part of a run: ranks, the checkpoint agent and the launcher."""
