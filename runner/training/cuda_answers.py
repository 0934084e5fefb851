"""Answers what libraries ask CUDA when they are imported, without initializing it in this process.

bitsandbytes asks for each GPU's compute capability, torchao and others whether Triton works there. torch initializes
CUDA to answer, after which no fork of the process could use it. Here a fork answers, and ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from checkpointing.host.threads import is_readable
from runner.system import processes

# Initializing CUDA takes about a second, and several on a machine with many GPUs.
_LIMIT_S = 60.0
_COMPILER = "torch._dynamo.variables.torch"


@contextlib.contextmanager
def answered_by_fork() -> Iterator[None]:
    """Have a fork answer `torch.cuda.get_device_properties` and `current_device`, and what torch derives from them.

    If the fork cannot, torch answers as usual, and initializes CUDA in this process. What keeps a reference to these
    functions is answered by torch after the context has ended.
    """
    cuda: Any = torch.cuda
    properties, current = cuda.get_device_properties, cuda.current_device
    has_ended = False

    # None until the fork has answered: it asks the same itself, while torch initializes CUDA there.
    answers: list[SimpleNamespace] | None = None
    was_asked = False

    def answer_if_wanted() -> list[SimpleNamespace] | None:
        nonlocal answers, was_asked
        if has_ended or torch.cuda.is_initialized():
            return None
        if not was_asked:
            was_asked = True
            # No process can be started, or somebody else has waited for it.
            with contextlib.suppress(OSError):
                answers = _answer_of_fork(properties)
        return answers

    @functools.wraps(properties)
    def get_device_properties(device: Any = None) -> Any:
        found = answer_if_wanted()
        # None is the current device, which is the first.
        index = (_get_device_index(device, optional=True) if device is not None else None) or 0
        return found[index] if found is not None and 0 <= index < len(found) else properties(device)

    @functools.wraps(current)
    def current_device() -> int:
        # As long as CUDA is not initialized, nobody can have chosen another.
        return 0 if answer_if_wanted() is not None else int(current())

    compiler_was_loaded = _COMPILER in sys.modules
    cuda.get_device_properties, cuda.current_device = get_device_properties, current_device
    try:
        yield
    finally:
        has_ended = True
        # The compiler knows torch's functions by identity: where it was imported meanwhile, it knows these. A library
        # may have put others in their place.
        if compiler_was_loaded or _COMPILER not in sys.modules:
            if cuda.get_device_properties is get_device_properties:
                cuda.get_device_properties = properties
            if cuda.current_device is current_device:
                cuda.current_device = current


def _answer_of_fork(properties: Callable[[int], Any]) -> list[SimpleNamespace] | None:
    """Return the properties of each GPU; None if a fork cannot tell."""
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        status = 1
        try:
            processes.die_with_parent(lambda: os.getppid() != parent)
            # A driver that hangs must not keep the parent's sockets open.
            os.closerange(3, writer)
            os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
            found = [_plain(properties(index)) for index in range(torch.cuda.device_count())]
            with os.fdopen(writer, "wb") as answer:
                pickle.dump(found, answer)
            status = 0
        finally:
            # No exit function of the parent's libraries may run here.
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        if not is_readable(answer, _LIMIT_S):
            # A driver that hangs may keep it from dying: nobody waits for that.
            os.kill(pid, signal.SIGKILL)
            return None
        data = answer.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(data) or None if status == 0 else None


def _plain(properties: Any) -> SimpleNamespace:
    """Return a copy of torch's object, which cannot be sent to another process."""
    values = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    kinds = (bool, int, float, str, tuple)
    return SimpleNamespace(**{name: value for name, value in values.items() if isinstance(value, kinds)})
