"""The state of a training, of each kind: what belongs to it, how it is captured and restored."""
