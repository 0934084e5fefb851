"""The command `runner`: its commands, and the exit codes of errors."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

import click

from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.host.limits import explained
from runner import __version__
from runner.cli import ask, chaos, copies, forecast, inspect, logs, rehearse, start
from runner.cli.checkpoints import checkpoints
from runner.errors import ExitCode, RunnerError, unusable, with_path
from runner.system.text import visible

# Heavier imports are inside the commands, to keep `runner --help` fast.


@click.group(
    context_settings={
        "help_option_names": ["-h", "--help"],
        # torchrun accepts --nproc_per_node as well as --nproc-per-node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)
@click.version_option(__version__, prog_name="runner")
def cli() -> None:
    # The marker \b keeps click from rewrapping the table.
    """Run PyTorch training jobs that survive crashes, preemption and damaged checkpoints.

    \b
    Exit codes of `start`:
       0 finished            2 usage error            74 storage failed
      75 stopped on request  76 restarts spent        78 would fail again
      79 no progress         80 bad node              81 no valid checkpoint
    """  # noqa: D301


_COMMANDS = [
    start.init,
    start.start,
    rehearse.rehearse,
    inspect.config,
    inspect.status,
    inspect.report,
    logs.logs,
    ask.save,
    ask.stop,
    forecast.doctor,
    forecast.plan,
    forecast.simulate,
    chaos.chaos,
    checkpoints,
]
for _command in (copies.copy, copies.diff, copies.export, copies.push):
    checkpoints.add_command(_command)
for _command in _COMMANDS:
    cli.add_command(_command)


def open_closed_streams() -> None:
    """Have standard streams that were closed lead nowhere: what is opened next would get their numbers.

    A rank's standard output would be a socket of the runner's, and Python itself would have no `sys.stdout`.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            # Something that was imported may have the number by now.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def main() -> None:
    """Run the command line. Every expected error is one line on standard error and an exit code."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Print a question mark for characters that the terminal or log cannot encode.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(visible(shown.getvalue()), err=True, nl=False)
        sys.exit(ExitCode.USAGE)
    except click.Abort:
        sys.exit(130)
    except RunnerError as error:
        _exit(error, error.exit_code)
    except CheckpointError as error:
        _exit(error, ExitCode.BUDGET_SPENT if isinstance(error, StorageUnreachable) else ExitCode.USAGE)
    except (OSError, RuntimeError) as error:
        _exit_for(error)


def _exit_for(error: OSError | RuntimeError) -> NoReturn:
    from checkpointing.storage.object_store import StorageTimeout

    if isinstance(error, StorageTimeout):
        _exit(error, ExitCode.BUDGET_SPENT)
    if isinstance(error, RuntimeError):
        # Python has no type for a thread that cannot be started.
        if not (limit := explained(str(error))):
            raise error
        _exit(error, ExitCode.BUDGET_SPENT, limit)
    if not error.filename and not _can_be_written(1):
        click.echo(f"runner: error: cannot write standard output: {error.strerror or error}", err=True)
        # A normal exit would try to flush the buffer again.
        from runner.ranks.output import drain_streams

        drain_streams()
        os._exit(int(ExitCode.STORAGE_FAILED))
    if limit := explained(error.strerror or str(error)):
        _exit(error, ExitCode.BUDGET_SPENT, limit)
    failed = unusable(with_path(error), error)
    _exit(failed, failed.exit_code)


def _exit(error: Exception, code: ExitCode, limit: str = "") -> NoReturn:
    click.echo(f"runner: error: {visible(str(error))}{limit}", err=True)
    sys.exit(int(code))


def _can_be_written(stream: int) -> bool:
    # Python's buffers no longer contain what failed, so the test writes one more byte.
    try:
        os.write(stream, b"\n")
    except OSError:
        return False
    return True
