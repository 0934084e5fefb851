"""Tensors as files of a checkpoint, and back."""
