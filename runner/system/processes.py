"""Linux process control: nobody outlives the supervisor unnoticed, and nobody is left behind.

Every process of a run carries the run's id in its environment, so that strays of an earlier life can be found by
reading /proc even when their parents are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

RUN_ID_ENV = "RUNNER_RUN_ID"
# What a user, a scheduler or a kubelet sends to have the run stop.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
FORK_SERVER_NAME = "fork-server"
_TRACKER_PATIENCE_S = 1.0
# Where glibc keeps POSIX semaphores (sem_overview(7)).
_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = (1 << 64) - 1


def _prctl(option: int, value: int) -> None:
    # Its arguments are unsigned longs; ctypes would pass ints.
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that they can be found and reaped (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def yield_to_others() -> None:
    """Wait for a processor that is free, or for the next tick, rather than interrupt a rank in mid-step.

    SCHED_BATCH (sched(7)); what this process starts is scheduled as usual.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def die_with_parent(is_orphan: Callable[[], bool]) -> None:
    """Be killed when the parent dies, however it dies (prctl(2)).

    Args:
        is_orphan: whether it has died before this call, which the kernel does not tell.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if is_orphan():
        os.kill(os.getpid(), signal.SIGKILL)


def be_traceable() -> None:
    """Let other processes of this user look at the stacks, where Yama lets only ancestors do so (prctl(2))."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)


def set_name(name: str) -> None:
    """What `ps -o comm` shows for this process; 15 characters at most (prctl(2))."""
    text = ctypes.create_string_buffer(name.encode())
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, ctypes.addressof(text))


def descendants() -> list[psutil.Process]:
    """All living processes below this one."""
    return [process for process in psutil.Process().children(recursive=True) if _alive(process)]


def mark(run_id: str, node_rank: int) -> str:
    """The value of `RUN_ID_ENV`: two nodes of a run may share a machine, and must not sweep each other."""
    return f"{run_id}/{node_rank}"


def semaphore_prefix(mark: str) -> str:
    """How the names of the POSIX semaphores begin that multiprocessing makes for the processes of this mark."""
    return f"mp-{hashlib.blake2b(mark.encode(), digest_size=5).hexdigest()}"


def remove_semaphores(mark: str) -> None:
    """What killed processes of this mark have left, where multiprocessing's tracker was killed with them."""
    for left in _SHARED_MEMORY.glob(f"sem.{semaphore_prefix(mark)}-*"):
        with contextlib.suppress(OSError):
            left.unlink()


def processes_of_run(run_id: str, node_rank: int) -> list[psutil.Process]:
    """Processes of this user that carry a node's mark and are not this process or above it."""
    marker = f"{RUN_ID_ENV}={mark(run_id, node_rank)}".encode()
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for pid in psutil.pids():
        if pid in own:
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
    return found


def kill_all(find: Callable[[], list[psutil.Process]], timeout_s: float = 10.0) -> int:
    """SIGKILL everything that `find` returns until it returns nothing; returns how many were killed.

    multiprocessing's resource tracker is given a moment: it ends once nobody it works for is left, and then removes
    the semaphores that killed processes have left in /dev/shm.
    """
    killed: set[int] = set()
    began = time.monotonic()
    while time.monotonic() < began + timeout_s:
        processes = [process for process in find() if _alive(process)]
        if not processes:
            break
        patient = time.monotonic() < began + min(_TRACKER_PATIENCE_S, timeout_s / 2)
        victims = [process for process in processes if not (patient and is_tracker(process))]
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        psutil.wait_procs(processes, timeout=0.5 if victims else 0.02)
    return len(killed)


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is a resource tracker of `multiprocessing`, by its command line."""
    return "multiprocessing.resource_tracker" in _command(process)


def is_fork_server(process: psutil.Process) -> bool:
    """Whether it is the launcher's fork server, or one of `multiprocessing`'s own."""
    try:
        return process.name() == FORK_SERVER_NAME or "multiprocessing.forkserver" in _command(process)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def reap_strays(managed: set[int]) -> None:
    """Collect adopted children that have ended; `managed` pids are left to whoever started them."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in managed and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where it does not live (proc(5))."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in ("Z", "X") else None
    return None


def state(pid: int) -> str:
    """One letter, as in ps(1): R, S, D, T (stopped), t (traced), Z; a question mark where there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
