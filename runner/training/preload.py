"""Slow imports of a rank, done once in the fork server.

Only the fork server imports this module. Nothing in it may start CUDA or a thread.
"""

import contextlib
import functools
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from runner.config import trainer_options
from runner.system import processes
from runner.training.cuda_answers import answered_by_fork


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep what is printed off the console. What a library has taken for its output meanwhile is the console again."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


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
        if "accelerate" in sys.modules:
            # accelerate imports it, if it is there, when training begins. It takes two seconds.
            with contextlib.suppress(Exception), _silenced():
                importlib.import_module("deepspeed")
            # It asks for the same packages two dozen times, and parses their metadata for each answer.
            with contextlib.suppress(Exception):
                imports: Any = importlib.import_module("accelerate.utils.imports")
                imports._is_package_available = functools.cache(imports._is_package_available)
                imports.is_peft_available()
        if "runner.training.job" in sys.modules:
            # What every rank would look up again to read its configuration.
            with contextlib.suppress(Exception):
                trainer_options.fields()
finally:
    # Frozen objects are neither scanned by the ranks' collections (0.3 s each) nor are their pages copied.
    gc.collect()
    gc.freeze()
    gc.enable()
