"""Imported once by the fork server, and by nobody else: everything slow that a rank needs, and nothing that starts CUDA
or a thread.
"""

import gc

from runner import processes

# By itself it would live as long as any rank does, and the ranks as long as it. Before there are ranks, it sees itself
# when the launcher has died.
processes.die_with_parent(lambda: False)

import datasets  # noqa: E402, F401
import trl.trainer.sft_trainer  # noqa: E402, F401

import runner.training.job  # noqa: E402, F401

# What was imported stays: no rank's garbage collection need look at it again (0.3 s for each that a Trainer asks for),
# nor copy its pages.
gc.collect()
gc.freeze()
