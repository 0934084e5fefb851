"""Entry points of the processes that are forked from the fork server, and what a rank reports to the supervisor."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpointing.errors import EXIT_PREEMPTED, CheckpointError
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.host.own_files import open_own
from checkpointing.host.process_title import name_this_process
from checkpointing.manager import rank_signals
from runner.errors import RunnerError
from runner.program.program import Program
from runner.recovery.classify import of_its_origin, printable
from runner.system import processes
from runner.training.program_ends import heard_ends, name_what_stays, unfinished_training
from runner.training.protection import Protection
from runner.training.user_program import run_program

_MAX_ERROR = 4000
# Modules whose frames lead to the user's program.
_RUNNING = {__name__, "runner.training.user_program", "runner.training.program_ends", "runpy"}
# Seconds that `send_surely` waits for space in the supervisor's short queue.
_PATIENCE_S = 2.0
# Without `LOCAL_RANK`, which would have accelerate begin a process group.
ALONE = {"WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}


class EventSender:
    """Sends events to the supervisor, as datagrams. Training does not depend on the receiver: it never waits long."""

    def __init__(self, path: str, attempt: int = 0) -> None:
        self._path, self._attempt = path, attempt
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def send_surely(self, event: str, **details: Any) -> None:
        """Send an event with its fields, waiting a moment for space in the queue."""
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):
            while True:
                try:
                    return self._send(event, details)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(0.001)

    def say(self, what: str) -> None:
        """Have the console say what the first rank does before its first step, if that takes long."""
        if os.environ["RANK"] == "0":
            self.send_surely("working", rank=0, what=what)

    def _send(self, event: str, details: dict[str, Any]) -> None:
        # An exception's text may quote a name that is not UTF-8.
        texts = {name: printable(value) for name, value in details.items() if isinstance(value, str)}
        message = {"event": event, "in_attempt": self._attempt, **details, **texts}
        self._sock.sendto(json.dumps(message).encode(), self._path)


def run_rank(spec: dict[str, Any]) -> None:
    """Set up the rank and run its job.

    Args:
        spec: `env` (variables to set), `events` (path of the socket), `config` (file), `cache` (folder), `program`
            (the user's own, or None), `resilient` (as in the configuration), `resumes` (see `run_job`), `accelerators`
            (number on this node).
    """
    _become_independent()
    processes.be_traceable()
    sender = EventSender(spec["events"], RankSettings.from_json(spec["env"][SETTINGS_ENV]).attempt)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # Without the arguments, which may be secrets: other users see it.
    command = Program.from_json(spec["program"]).label if spec["program"] is not None else "runner start"
    name_this_process(f"rank {rank} of {os.environ['WORLD_SIZE']}", command, lambda: processes.set_name(f"rank {rank}"))
    processes.set_name(f"rank {rank}")
    # A stop signal may reach only one of the ranks, at any time.
    rank_signals.install(lambda: sender.send_surely("stop_signal", rank=rank))
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
        if spec["program"] is None:
            sender.say("loading the libraries of the bundled job")
            from runner.training.job import run_job

            run_job(spec["config"], spec["cache"], sender, resumes=spec["resumes"])
        else:
            _protection(spec["resilient"], sender, rank).begin()
            with heard_ends(lambda text: _report_failure(sender, rank, text, None, transient=False)):
                run_program(Program.from_json(spec["program"]))
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
        print_traceback(error, is_own=spec["program"] is not None)
        text, frame = describe(error)
        _report_failure(sender, rank, text, frame, transient=is_transient(error))
        raise
    finally:
        name_what_stays(rank)
        # multiprocessing skips exit functions in its children, but those of a script, such as wandb's, must run as
        # under torchrun.
        atexit._run_exitfuncs()
    if (left := unfinished_training()) is not None:
        _report_failure(sender, rank, left, None, transient=False)
        raise SystemExit(1)
    sender.send_surely("rank_done", rank=rank)


def _protection(mode: str, sender: EventSender, rank: int) -> Protection:
    return Protection(
        mode,
        lambda reason: _report_unprotected(sender, rank, reason),
        lambda: sender.send_surely("program_steps", rank=rank),
        lambda event: sender.send_surely("program_checkpoint", rank=rank, report=event.to_dict()),
        # Of the first rank alone: others may open runs of their own, in groups.
        tracks=rank == 0,
    )


def _report_unprotected(sender: EventSender, rank: int, reason: str) -> None:
    """Send why nothing of a program is saved, from the first rank."""
    if rank == 0:
        sender.send_surely("unprotected", rank=rank, reason=reason[:_MAX_ERROR])


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
    log = open_own(Path(spec["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    for number in (*processes.STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Connection errors, time-outs and failed name lookups, by their class names in requests, urllib3, httpx, aiohttp,
# botocore and huggingface_hub. Importing those packages for isinstance would cost each rank more than a second.
_NETWORK_ERRORS = {
    "ConnectionError",
    "TimeoutError",
    "gaierror",
    "Timeout",
    "TransportError",
    "HTTPClientError",
    "IncompleteRead",
    "ProtocolError",
    "MaxRetryError",
    "ChunkedEncodingError",
    "ClientConnectionError",
    "ServerTimeoutError",
    "LocalEntryNotFoundError",
}
# HTTP statuses below 500 that a retry can change: request time-out, too early, too many requests.
_TRANSIENT_STATUS = {408, 425, 429}
# Of a shared volume that fails over. Others are a script's own, or of the machine.
_PASSING = {
    errno.EIO,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ENOLCK,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
}
# A bug in a handler of network errors fails again.
_PROGRAMMING_ERRORS = (NameError, SyntaxError, ImportError, AttributeError, TypeError)

_TRUE = {"1", "ON", "YES", "TRUE"}


def describe(error: BaseException) -> tuple[str, str | None]:
    """Describe an exception as torchelastic does: type and message, and `file:line` of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    try:
        message = str(error)
    except Exception:  # A broken __str__; Python's own traceback prints the same text.
        message = "<exception str() failed>"
    return of_its_origin(f"{type(error).__name__}: {message}", frame)


def is_transient(error: BaseException) -> bool:
    """Return whether a failure of a network, a server or a volume caused the error, that a retry may not meet again.

    The outermost exception of the chain that is about one of these decides.
    """
    chain = list(_chain(error))
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    # A file missing from the cache is permanent in offline mode, which is read as huggingface_hub does.
    offline = os.environ.get("HF_HUB_OFFLINE", os.environ.get("TRANSFORMERS_OFFLINE", "")).upper() in _TRUE
    if "OfflineModeIsEnabled" in names or (offline and "LocalEntryNotFoundError" in names):
        return False
    if isinstance(error, _PROGRAMMING_ERRORS):
        return False
    for one in chain:
        status = _http_status(one)
        if status is not None:
            return status >= 500 or status in _TRANSIENT_STATUS
        if _NETWORK_ERRORS & {base.__name__ for base in type(one).__mro__}:
            return True
        if isinstance(one, OSError) and one.errno in _PASSING:
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, as a traceback shows them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _http_status(error: BaseException) -> int | None:
    response: Any = getattr(error, "response", None)
    found: Any = getattr(response, "status_code", None)
    if isinstance(response, dict):
        # botocore stores the status in a dict.
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if found is None and type(error).__name__ in ("HTTPError", "ClientResponseError"):
        # urllib and aiohttp store it in the exception.
        found = getattr(error, "code", None) or getattr(error, "status", None)
    return found if isinstance(found, int) and 100 <= found < 600 else None


def print_traceback(error: BaseException, *, is_own: bool) -> None:
    """Print a traceback on standard error, as Python itself would.

    Errors of the runner and of checkpointing explain themselves, so only their message is printed. With `is_own`, the
    program is the user's: frames before its first one belong to the runner and are left out.
    """
    trace = _from_program(error.__traceback__) if is_own else error.__traceback__
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        if isinstance(error, (CheckpointError, RunnerError)):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            # A script may have installed its own hook, such as rich's.
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.stderr.flush()


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is neither the runner's nor of what runs a file.

    None without one: the program could not be compiled, and the error names the place.
    """
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _RUNNING:
        trace = trace.tb_next
    return trace
