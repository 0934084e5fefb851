"""This process of the training: its ranks, its device, its random numbers and its trees of tensors."""
