"""The accelerators of one node in one all-reduce: a link between two of them may fail where each alone is sound."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from runner.doctor.all_reduce import all_reduce_is_right
from runner.system import processes

# A link that transfers nothing: the back end ends the process then.
_TIMEOUT = timedelta(seconds=60)
# What a driver says where a process that was killed has its memory yet, or another one the whole GPU.
IN_USE = re.compile("out of memory|busy or unavailable", re.IGNORECASE)
# Exit status of a rank whose sum was wrong.
WRONG = 3


def fault_between(devices: Sequence[torch.device]) -> str:
    """Return what is wrong with an all-reduce over devices of this node, in words; empty if nothing is.

    Args:
        devices: At least two accelerators; or the CPU several times, for tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.getpid(), [str(device) for device in devices], str(Path(folder) / "store"))
        try:
            spawn(_rank, args=arguments, nprocs=len(devices))  # type: ignore[no-untyped-call]
        except ProcessExitedException as error:
            if error.exit_code == WRONG:
                return "compute a wrong sum together"
            if error.signal_name == signal.SIGKILL.name:
                # By another process, or since memory ran out.
                return ""
            return f"cannot communicate: rank {error.error_index} ended with {error.signal_name or error.exit_code}"
        except ProcessRaisedException as error:
            if IN_USE.search(str(error)):
                return ""
            return f"cannot communicate: {str(error).strip().splitlines()[-1]}"
    return ""


def _rank(rank: int, parent: int, devices: list[str], store: str) -> None:
    processes.die_with_parent(lambda: os.getppid() != parent)
    device = torch.device(devices[rank])
    on_host = device.type == "cpu"
    if not on_host:
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=len(devices),
        timeout=_TIMEOUT,
        device_id=None if on_host else device,
    )
    right = all_reduce_is_right(device, rank, len(devices))
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        os._exit(WRONG)
