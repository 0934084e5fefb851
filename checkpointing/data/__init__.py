"""Data positions: where in its data a training is, and how a resumed one gets back there."""
