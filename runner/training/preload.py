"""Imported once by the fork server, and by nobody else: everything slow that a rank needs, and nothing that starts CUDA
or a thread.
"""

from runner import processes

# By itself it would live as long as any rank does, and the ranks as long as it. Before there are ranks, it sees itself
# when the launcher has died.
processes.die_with_parent(lambda: False)

import datasets  # noqa: E402, F401
import trl.trainer.sft_trainer  # noqa: E402, F401

import runner.training.job  # noqa: E402, F401
