"""Computes and stores known values on every accelerator of this node, and adds up over all of them.

It prints what was wrong as a JSON list.

    python -m runner.doctor.health PARENT_PID

A node of several runs it before it takes part (`runner/node/health_check.py`): a GPU that computes wrong numbers fails
no call, and a bad cell of its memory only shows when it is used. It takes about a second per GPU,
and a few more for the sum over several.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import torch

from runner.doctor.all_reduce import IN_USE, fault_between
from runner.system import processes

_SIZE = 1024
_REPEATS = 20
# Of memory, as much is tested, but no more than a share of what is free.
_MAX_BYTES = 1 << 30
_FREE_SHARE = 0.1
# Every bit is once 0 and once 1.
_PATTERNS = (0x5555555555555555, -0x5555555555555556)


def faults() -> Iterator[str]:
    """Yield what is wrong with the accelerators that torch sees; nothing where there are none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return
    devices = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    are_sound = True
    for device in devices:
        try:
            found = list(faults_of(device))
        except torch.OutOfMemoryError:
            # Another process uses it; what it computed before that was right.
            are_sound = False
            continue
        except RuntimeError as error:
            if IN_USE.search(str(error)):
                are_sound = False
                continue
            found = [f"failed: {str(error).splitlines()[0]}"]
        yield from (f"GPU {device.index} {fault}" for fault in found)
        are_sound = are_sound and not found
    if are_sound and len(devices) > 1 and (fault := fault_between(devices)):
        yield f"GPUs 0 to {len(devices) - 1} {fault}"


def faults_of(device: torch.device) -> Iterator[str]:
    """Yield what is wrong with an accelerator, or with the CPU in tests.

    Products are of small integers, so that every order of additions gives the same float32.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (_SIZE, _SIZE), generator=generator).float() for _ in range(2))
    expected = left @ right
    ours, theirs = left.to(device), right.to(device)
    wrong = sum(not torch.equal((ours @ theirs).cpu(), expected) for _ in range(_REPEATS))
    if wrong:
        yield f"computes wrong products ({wrong} of {_REPEATS})"
    memory = torch.empty(_tested_bytes(device) // 8, dtype=torch.int64, device=device)
    for pattern in _PATTERNS:
        memory.fill_(pattern)
        lost = int((memory != pattern).sum())
        if lost:
            yield f"does not keep what is written to its memory ({lost} of {memory.numel()} words)"
            return


def _tested_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(_MAX_BYTES, int(free * _FREE_SHARE))
    return _MAX_BYTES // 16


if __name__ == "__main__":
    # A driver that hangs must not hold this process when the runner is killed.
    processes.die_with_parent(lambda: os.getppid() != int(sys.argv[1]))
    json.dump(list(faults()), sys.stdout)
