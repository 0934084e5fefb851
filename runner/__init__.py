"""The control plane: `runner start` keeps a training run going across crashes, preemption and restarts.

Start reading at `cli`, then `supervisor`. Only what runs in a rank, or in its own process, imports torch.
"""

__version__ = "0.1.0"
