"""Hardware of this node: GPUs and the bandwidth of storage."""
