"""Entry points of the processes that are forked from the fork server: a rank, and one that prepares its data."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from checkpointing.errors import EXIT_PREEMPTED
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.manager import stop_signal
from runner.recovery.evidence import printable
from runner.system import processes
from runner.training.failure_report import describe, is_transient, print_traceback

_MAX_ERROR = 4000
# Seconds that `send_surely` waits for space in the supervisor's short queue.
_PATIENCE_S = 2.0
# Without `LOCAL_RANK`, which would have accelerate begin a process group.
ALONE = {"WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}


class EventSender:
    """Sends events to the supervisor, as datagrams that are dropped rather than waited for.

    It never blocks for long and never fails, so training does not depend on the receiver.

    Args:
        path: Path of the receiver's socket.
        attempt: Number of the attempt.
    """

    def __init__(self, path: str, attempt: int = 0) -> None:
        self._path, self._attempt = path, attempt
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def send(self, event: str, **details: Any) -> None:
        """Send an event with its fields, or drop it if the queue is full."""
        with contextlib.suppress(OSError):
            self._send(event, details)

    def send_surely(self, event: str, **details: Any) -> None:
        """Send an event likewise, waiting a moment for space in the queue."""
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):
            while True:
                try:
                    return self._send(event, details)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(0.001)

    def _send(self, event: str, details: dict[str, Any]) -> None:
        # An exception's text may quote a name that is not UTF-8.
        texts = {name: printable(value) for name, value in details.items() if isinstance(value, str)}
        message = {"event": event, "in_attempt": self._attempt, **details, **texts}
        self._sock.sendto(json.dumps(message).encode(), self._path)


def run_rank(spec: dict[str, Any]) -> None:
    """Set up the rank and run its job.

    Args:
        spec: `env` (variables to set), `events` (path of the socket), `config` (file), `cache` (folder), `script` and
            `args` (the user's own script, or None), `resumes` (see `run_job`), `accelerators` (number on this node).
    """
    _become_independent()
    processes.be_traceable()
    sender = EventSender(spec["events"], RankSettings.from_json(spec["env"][SETTINGS_ENV]).attempt)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    processes.set_name(f"rank {rank}")
    # A stop signal may reach only one of the ranks, at any time.
    stop_signal.install(lambda: sender.send_surely("stop_signal", rank=rank))
    os.environ.update(spec["env"])
    faulthandler.enable()
    # A child of a fork server inherits its start method. The workers of a script, such as a DataLoader's, must start as
    # under torchrun: by the platform's default, without importing the script again.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    sender.send_surely("rank_started", rank=rank, local_rank=local_rank, pid=os.getpid(), error_file=error_file)
    try:
        # A fresh interpreter has not imported torch yet. Without a GPU there is nothing to check: a CUDA build of torch
        # has only asked the driver, in the process from which this one was forked, which does no harm.
        if spec["accelerators"] and "torch" in sys.modules:
            from checkpointing.process import device

            device.check_fork()
        if spec["script"] is None:
            from runner.training.job import run_job

            run_job(spec["config"], spec["cache"], sender, resumes=spec["resumes"])
        else:
            _run_script(spec["script"], spec["args"])
    except SystemExit as error:
        if error.code == EXIT_PREEMPTED:
            # An orderly stop, for which the other ranks need time, too.
            sender.send_surely("rank_preempted", rank=rank)
        elif isinstance(error.code, str):
            # Python itself prints the text.
            _report_failure(sender, rank, f"SystemExit: {error.code}", None, transient=False)
        raise
    except BaseException as error:
        # torchrun stores the error in a file and prints nothing.
        print_traceback(error, spec["script"])
        text, frame = describe(error)
        _report_failure(sender, rank, text, frame, transient=is_transient(error))
        raise
    finally:
        # multiprocessing skips exit functions in its children, but those of a script, such as wandb's, must run as
        # under torchrun.
        atexit._run_exitfuncs()
    sender.send_surely("rank_done", rank=rank)


def _report_failure(sender: EventSender, rank: int, error: str, frame: str | None, *, transient: bool) -> None:
    """Send the failure, cut to the size of a datagram; the rank's log has the rest."""
    sender.send_surely("rank_failed", rank=rank, error=error[:_MAX_ERROR], frame=frame, transient=transient)


def run_preparation(spec: dict[str, str]) -> None:
    """Prepare the data of the bundled job; the output goes to a file.

    Args:
        spec: `config` (file), `cache` (folder) and `log` (file).
    """
    _become_independent()
    processes.set_name("prepare")
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(ALONE)
    from runner.training.job import prepare

    prepare(spec["config"], Path(spec["cache"]))


def _become_independent() -> None:
    """Undo what a fork has of the launcher: its death ends this process, too, and signals have their own effect."""
    launcher = multiprocessing.parent_process()
    # The fork server dies with the launcher, and this process with the fork server.
    processes.die_with_parent(lambda: launcher is not None and not launcher.is_alive())
    _restore_signals()


def _restore_signals() -> None:
    """Restore default signal handlers as under torchrun, because the launcher ignores signals."""
    for number in processes.STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_script(script: str, args: list[str]) -> None:
    """Run a script as torchrun does: as `__main__`, its folder first on the path, its arguments in `sys.argv`."""
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # noqa: PTH100, PTH120
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (0, None):
            raise
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
