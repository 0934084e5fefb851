"""The supervisor: `runner start` keeps a training run going across crashes, preemption and restarts.

Start reading at `cli`, then `supervisor`. Nothing here imports torch outside `launcher` and `training`.
"""

__version__ = "0.1.0"
