"""What `runner start` prints of the end of a run."""

from __future__ import annotations

import time
from pathlib import Path

import click

from runner.config.schema import Config
from runner.errors import ExitCode
from runner.journal.journal import read_journal
from runner.journal.run_directory import RunDirectory
from runner.journal.summary import RunSummary, render, summarise
from runner.supervisor.supervisor import Supervisor


def print_outcome(supervisor: Supervisor, exit_code: ExitCode, config: Config, directory: RunDirectory) -> None:
    """Print how a run has ended."""
    summary = _summary_of(directory)
    if summary.step > 0:
        click.echo(render(summary, paths_of(config, directory)))
    elif exit_code == ExitCode.DONE:
        click.echo("runner: finished")
    if exit_code != ExitCode.DONE:
        # Not from the journal: it may have been moved away, or its disk may be full.
        state = "stopped" if exit_code == ExitCode.PREEMPTED else "failed"
        shown = supervisor.failed_log is not None and exit_code != ExitCode.PREEMPTED
        log = f"; log: {supervisor.failed_log}" if shown else ""
        click.echo(f"runner: {state}: {supervisor.reason} (exit code {int(exit_code)}{log})")


def print_summary(config: Config, directory: RunDirectory) -> None:
    """Print the summary of a run that is finished."""
    click.echo(render(_summary_of(directory), paths_of(config, directory)))


def _summary_of(directory: RunDirectory) -> RunSummary:
    return summarise(read_journal(directory.journal), now=time.time())


def paths_of(config: Config, directory: RunDirectory) -> dict[str, str]:
    """Return what a run leaves, by name: the paths that exist, and URLs."""
    paths = {
        "best model": str(directory.best_model),
        "checkpoints": config.checkpoint_location,
        **({"local tier": config.checkpoint.local_tier} if config.checkpoint.local_tier else {}),
        "journal": str(directory.journal),
        "logs": str(directory.logs),
    }
    return {name: path for name, path in paths.items() if "://" in path or Path(path).exists()}
