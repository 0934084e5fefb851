"""Data positions: where training is in its data, and how a resumed run returns to that place."""
