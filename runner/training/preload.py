"""Slow imports of a rank, done once in the fork server.

Only the fork server imports this module. Nothing in it may start CUDA or a thread.
"""

import contextlib
import gc
import importlib
import os

from runner.system import processes
from runner.training.cuda_answers import answered_by_fork

# The launcher may die without a chance to stop the fork server.
processes.die_with_parent(lambda: False)
# Imported objects are never freed; scanning them repeatedly takes a seventh of the time.
gc.disable()
try:
    with answered_by_fork():
        # If an import fails, the rank that needs it reports the error.
        for name in os.environ.get(processes.PRELOAD_ENV, "").split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
finally:
    # Frozen objects are neither scanned by the ranks' collections (0.3 s each) nor are their pages copied.
    gc.collect()
    gc.freeze()
    gc.enable()
