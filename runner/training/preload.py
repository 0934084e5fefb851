"""Imported once by the fork server, and by nobody else: everything slow that a rank needs, and nothing that starts CUDA
or a thread.
"""

import contextlib
import gc
import importlib

from runner.system import processes

# when the launcher has died.
processes.die_with_parent(lambda: False)
# What is imported stays; looking through it again and again takes a seventh of the time.
gc.disable()
try:
    # Where something cannot be imported, the fork server goes on without it, and a rank that needs it says so.
    for name in ("transformers.trainer", "datasets", "trl.trainer.sft_trainer", "runner.training.job"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
finally:
    # Nor need any rank's collection look at it (0.3 s for each that a Trainer asks for), or copy its pages.
    gc.collect()
    gc.freeze()
    gc.enable()
