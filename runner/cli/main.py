"""The `runner` command. Thin: each command parses, calls, and turns errors into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys

import click

from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.storage.object_store import StorageTimeout
from runner import __version__
from runner.cli import chaos, checkpoints, forecast, init, inspect, start
from runner.errors import ExitCode, RunnerError

# Heavier imports stay inside the commands: `runner --help` answers in a blink.


@click.group(
    context_settings={
        "help_option_names": ["-h", "--help"],
        # torchrun accepts --nproc_per_node as well as --nproc-per-node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)
@click.version_option(__version__, prog_name="runner")
def cli() -> None:
    """Run PyTorch training jobs that survive crashes, preemption and damaged checkpoints.

    \b
    Exit codes of `start`:
       0 finished            2 usage error            74 storage failed
      75 stopped on request  76 restarts spent        78 would fail again
      79 no progress         80 bad node              81 no valid checkpoint
    """


_COMMANDS = [
    init.init,
    start.start,
    inspect.config,
    inspect.status,
    inspect.report,
    forecast.doctor,
    forecast.plan,
    forecast.simulate,
    chaos.chaos,
    checkpoints.checkpoints,
]
for _command in _COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Entry point: every expected error is one line on stderr and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or log of another character set gets a question mark.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except click.Abort:
        sys.exit(130)
    except RunnerError as error:
        click.echo(f"runner: error: {error}", err=True)
        sys.exit(int(error.exit_code))
    except CheckpointError as error:
        click.echo(f"runner: error: {error}", err=True)
        sys.exit(ExitCode.BUDGET_SPENT if isinstance(error, StorageUnreachable) else ExitCode.USAGE)
    except StorageTimeout as error:
        click.echo(f"runner: error: {error}", err=True)
        sys.exit(ExitCode.BUDGET_SPENT)
    except OSError as error:
        if not error.filename and not _can_be_written(1):
            click.echo(f"runner: error: standard output cannot be written: {error.strerror or error}", err=True)
            # What is left in its buffer would be tried again at the end.
            os._exit(int(ExitCode.STORAGE_FAILED))
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"runner: error: {place}{error.strerror or error}", err=True)
        sys.exit(ExitCode.USAGE)


def _can_be_written(stream: int) -> bool:
    # What failed is gone from Python's buffers, so one more byte is tried.
    try:
        os.write(stream, b"\n")
    except OSError:
        return False
    return True
