"""The journal of a run: typed events, the file, and what is computed from it."""
