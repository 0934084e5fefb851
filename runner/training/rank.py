"""The first thing that runs in a rank."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
from typing import Any

from checkpointing.environment import SETTINGS_ENV, RankSettings
from checkpointing.errors import EXIT_PREEMPTED
from checkpointing.rank import stop_signal
from runner.system import processes
from runner.training.events import EventSender
from runner.training.failure_report import describe, is_transient, print_traceback

_MAX_ERROR = 4000


def run_rank(spec: dict[str, Any]) -> None:
    """Set the rank up and run its job.

    Args:
        spec: `env` to set, `events` socket, `config` file; `script` and `args` where the user has an own script;
            `resumes`, of `run_job`; `accelerators`, how many this machine has.
    """
    launcher = multiprocessing.parent_process()
    # The fork server dies with the launcher, and this process with the fork server.
    processes.die_with_parent(lambda: launcher is not None and not launcher.is_alive())
    processes.be_traceable()
    _take_back_signals()
    sender = EventSender(spec["events"], RankSettings.from_json(spec["env"][SETTINGS_ENV]).attempt)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    processes.set_name(f"rank {rank}")
    # A notice may come to one rank alone, at any moment from now on.
    stop_signal.install(lambda: sender.send_surely("stop_signal", rank=rank))
    os.environ.update(spec["env"])
    faulthandler.enable()
    # A child of a fork server inherits its start method; a script's own workers (a DataLoader's) are to start as they
    # would under torchrun, by the platform's default, not by importing the script again.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    sender.send_surely("rank_started", rank=rank, local_rank=local_rank, pid=os.getpid(), error_file=error_file)
    try:
        # A fresh interpreter has not imported torch yet. On a machine without a GPU, a torch for CUDA has asked the
        # driver for one in the process that this one was forked from, to no harm.
        if spec["accelerators"] and "torch" in sys.modules:
            from checkpointing.rank import device

            device.check_fork()
        if spec["script"] is None:
            from runner.training.job import run_job

            run_job(spec["config"], spec["cache"], sender, resumes=spec["resumes"])
        else:
            _run_script(spec["script"], spec["args"])
    except SystemExit as error:
        if error.code == EXIT_PREEMPTED:
            # In good order: the others are to be left the time to do the same.
            sender.send_surely("rank_preempted", rank=rank)
        elif isinstance(error.code, str):
            # Printed by Python, as for any script.
            _say_failed(sender, rank, f"SystemExit: {error.code}", None, transient=False)
        raise
    except BaseException as error:
        # torchrun keeps it in a file for itself, and prints nothing.
        print_traceback(error, spec["script"])
        text, frame = describe(error)
        _say_failed(sender, rank, text, frame, transient=is_transient(error))
        raise
    finally:
        # What multiprocessing starts ends without them, and a script's own (wandb's, say) are to run as under torchrun.
        atexit._run_exitfuncs()
    sender.send_surely("rank_done", rank=rank)


def _say_failed(sender: EventSender, rank: int, error: str, frame: str | None, *, transient: bool) -> None:
    """A datagram holds so much; the rest is in the rank's log."""
    sender.send_surely("rank_failed", rank=rank, error=error[:_MAX_ERROR], frame=frame, transient=transient)


def _take_back_signals() -> None:
    """The launcher ignores them, and a script is to start as it would under torchrun."""
    for number in processes.STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_script(script: str, args: list[str]) -> None:
    """As torchrun does: `__main__`, its folder first on the path, its arguments in `sys.argv`."""
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
