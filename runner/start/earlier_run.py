"""An earlier run in the same folder, which `--resume never --overwrite` moves aside."""

from __future__ import annotations

import click

from runner.config.schema import Config
from runner.errors import UsageError
from runner.journal.run_directory import RunDirectory


def move_aside(config: Config, directory: RunDirectory, *, overwrite: bool) -> bool:
    """Make room for a new run; return whether an earlier run was moved aside.

    Raises:
        UsageError: There is an earlier run that may not or cannot be moved.
    """
    tiers = config.tiers
    steps = {step for storage in tiers.nearest_first for step in storage.steps()}
    if not steps and tiers.durable.root is None and tiers.durable.sidecars.read_restart_state() is not None:
        # The stored state of another run's failures does not apply to this one.
        tiers.durable.sidecars.write_restart_state(b"{}")
    if not steps and not directory.journal.exists():
        return False
    if not overwrite:
        raise UsageError(
            f"--resume never: {directory.root} already contains a run; add --overwrite to move it aside, or choose "
            "another --output-dir"
        )
    folders = [storage.root for storage in tiers.nearest_first if storage.root is not None]
    if tiers.durable.root is None and tiers.durable.steps():
        raise UsageError(
            f"--overwrite: {tiers.durable.location} contains checkpoints, and an object store cannot move them; choose "
            "another checkpoint.location, or remove them"
        )
    click.echo(f"runner: moved the earlier run to {directory.move_aside(folders)}")
    return True
