"""Hardware of this node: GPUs."""
