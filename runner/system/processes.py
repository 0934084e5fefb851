"""Linux process control: no process of a run outlives its supervisor unnoticed.

Every process of a run carries the run's id in its environment, so that leftovers of an earlier session can be found by
reading /proc even when their parents are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from checkpointing.host.memory import oom_kills
from checkpointing.host.threads import in_background

RUN_ID_ENV = "RUNNER_RUN_ID"
# Modules that the fork server loads before it forks ranks, separated by spaces; see `runner.launcher.launch_request`.
PRELOAD_ENV = "RUNNER_PRELOAD"
# The signals by which a user, a scheduler or a kubelet asks the run to stop.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
FORK_SERVER_NAME = "fork-server"
_TRACKER_PATIENCE_S = 1.0
_OLD_S = 10.0
# Seconds from the end of a parent to its signal.
_PARENT_S = 0.2
# Where glibc keeps POSIX semaphores (sem_overview(7)).
_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = (1 << 64) - 1


def _prctl(option: int, value: int) -> None:
    # The arguments are unsigned longs; by default ctypes would pass ints.
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that they can be found and reaped (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def yield_to_others() -> None:
    """Schedule this process so that it does not preempt a rank in mid-step (SCHED_BATCH, sched(7)).

    Its children are scheduled as usual.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def die_with_parent(is_orphan: Callable[[], bool]) -> None:
    """Have the kernel kill this process when its parent dies (prctl(2)); of one that died before it sends no signal."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if is_orphan():
        os.kill(os.getpid(), signal.SIGKILL)


def stop_with_parent(parent: int) -> None:
    """Send this process SIGTERM, once, when its parent has ended.

    The kernel's own signal (PR_SET_PDEATHSIG) comes again with the end of each of the parent's threads, and a second
    stop request ends a run at once.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    in_background(watch, "parent")


def be_traceable() -> None:
    """Let other processes of this user read the stacks, which Yama restricts to ancestors (prctl(2))."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)


def set_name(name: str) -> None:
    """Set what `ps -o comm` shows for this process, at most 15 characters (prctl(2))."""
    text = ctypes.create_string_buffer(name.encode())
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, ctypes.addressof(text))


def descendants() -> list[psutil.Process]:
    """Return all running descendants of this process."""
    return [process for process in psutil.Process().children(recursive=True) if is_running(process)]


def _is_of_a_run(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        # Of another user: ranks are this one's.
        return False
    return f"{RUN_ID_ENV}=".encode() in environment or b"=" not in environment


def mark(run_id: str, node_rank: int) -> str:
    """Return the value of `RUN_ID_ENV` for a node of a run.

    It contains the node rank because two nodes of a run may share a machine and must not kill each other's processes.
    """
    return f"{run_id}/{node_rank}"


def semaphore_prefix(mark: str) -> str:
    """Return the prefix of the POSIX semaphores that multiprocessing creates for the processes of a mark."""
    return f"mp-{hashlib.blake2b(mark.encode(), digest_size=5).hexdigest()}"


def remove_semaphores(mark: str) -> None:
    """Remove the semaphores of killed processes of a mark, whose resource tracker was killed with them."""
    for left in _SHARED_MEMORY.glob(f"sem.{semaphore_prefix(mark)}-*"):
        with contextlib.suppress(OSError):
            left.unlink()


def processes_of_run(run_id: str, node_rank: int) -> list[psutil.Process]:
    """Return the processes of this user that carry a node's mark, except this process and its ancestors."""
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
    """Send SIGKILL to what `find` returns until it returns nothing; return how many processes were killed.

    multiprocessing's resource tracker gets a moment: it exits after the processes that it works for, and then removes
    the semaphores that they left in /dev/shm.

    Args:
        find: Returns the processes that are still to be killed.
        timeout_s: Seconds after which to give up.
    """
    killed: set[int] = set()
    began = time.monotonic()
    while time.monotonic() < began + timeout_s:
        processes = [process for process in find() if is_running(process)]
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
    """Return whether a process is a resource tracker of `multiprocessing`, by its command line."""
    return "multiprocessing.resource_tracker" in _command(process)


def is_fork_server(process: psutil.Process) -> bool:
    """Return whether a process is the launcher's fork server, or one of `multiprocessing`."""
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
    """Reap adopted children that have exited, except the process ids in `managed`."""
    _reap(pid for pid, _ in _zombies(managed))


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        # Somebody else may have done so.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _zombies(managed: set[int]) -> set[tuple[int, int]]:
    """Return process ids and times of start of children that have exited, except the process ids in `managed`."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid not in managed and child.status() == psutil.STATUS_ZOMBIE:
                found.add((child.pid, round(child.create_time() * 100)))
    return found


def is_running(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is not running (proc(5))."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in ("Z", "X") else None
    return None


def state(pid: int) -> str:
    """Return the state of a process as one letter of ps(1), such as T (stopped); ? if it does not exist."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


class Host:
    """What the runner asks of the operating system of this node; unit tests replace it."""

    def __init__(self) -> None:
        """Note what runs below this process before the run begins.

        One that was started by `exec` keeps the children of the shell before it, such as a mounted file system or an
        SSH server: these, and what descends from them, are not the runner's to end. Such a process, and a container's
        first one, may also adopt what others than the run have started.
        """
        self._zombies: set[tuple[int, int]] = set()
        self._looked_at = self.monotonic()
        self._others = {(process.pid, start_ticks(process.pid)) for process in descendants()}
        # What the shell before `exec` had started may lose its parent, too.
        self._adopts_strangers = os.getpid() == 1 or bool(self._others)

    def monotonic(self) -> float:
        """Return the seconds of a clock that is never set."""
        return time.monotonic()

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out, in this container or on this node."""
        return oom_kills()

    def process_state(self, pid: int) -> str:
        """Return the state of a process as one letter of ps(1); ? if it does not exist."""
        return state(pid)

    def descendants(self) -> list[psutil.Process]:
        """Return the running descendants of this process that are a run's.

        Where this process adopts others, those are a run's that carry its mark, or descend from one that does. One that
        has overwritten its environment, or was started without one, counts as the run's: it may hold a GPU. Elsewhere
        all descendants are the run's, with whatever environment they were started, except those from before.
        """
        found: dict[int, psutil.Process] = {}
        spared: set[int] = set()
        # Parents come before their children.
        for process in descendants():
            with contextlib.suppress(psutil.Error):
                parent = process.ppid()
                if parent in spared or (process.pid, start_ticks(process.pid)) in self._others:
                    spared.add(process.pid)
                elif not self._adopts_strangers or parent in found or _is_of_a_run(process.pid):
                    found[process.pid] = process
        return list(found.values())

    def kill_all(self, find: Callable[[], list[psutil.Process]], timeout_s: float = 10.0) -> int:
        """Send SIGKILL to what `find` returns until it returns nothing; return how many processes were killed."""
        return kill_all(find, timeout_s)

    def reap_strays(self, managed: set[int]) -> None:
        """Reap adopted children that have exited, except the process ids in `managed`."""
        reap_strays(managed)

    def reap_old(self, managed: set[int]) -> None:
        """Reap, every 10 s, the children that had exited 10 s ago, except the process ids in `managed`.

        What this process has started itself, it waits for earlier. A rank's orphans are its children, too, and there
        may be one for each step: a container has a limit of processes.
        """
        if self.monotonic() < self._looked_at + _OLD_S:
            return
        self._looked_at = self.monotonic()
        now = _zombies(managed)
        _reap(pid for pid, _ in now & self._zombies)
        self._zombies = now - self._zombies
