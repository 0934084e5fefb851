"""The commands that take a checkpoint elsewhere: `runner checkpoints copy` and `export`."""

from __future__ import annotations

from pathlib import Path

import click

from runner.cli.locations import checkpoint_named, progress_bar, split_checkpoint, storage_at, tiers_of
from runner.cli.options import echo
from runner.errors import UsageError


@click.command()
@click.argument("source", metavar="CHECKPOINT_OR_LOCATION")
@click.argument("destination")
def copy(source: str, destination: str) -> None:
    """Copy a checkpoint (LOCATION/checkpoint-STEP), or all at a location, to DESTINATION, a folder or a URL.

    Every digest is compared. A copy is a checkpoint like any other: it appears whole or not at all, and `runner start`
    resumes from it. A command that was killed continues where it ended when it is given again. A checkpoint that
    DESTINATION has already is verified there; another one of the same step is never overwritten.
    """
    from checkpointing.commit.checkpoint_copy import copy_checkpoint
    from checkpointing.commit.tiers import FIRST_STAGE

    location, only = split_checkpoint(source)
    target, first, num_found = storage_at(destination), tiers_of(location), 0
    for stage, tiers in [(FIRST_STAGE, first), *first.stages]:
        catalog = tiers.catalog
        steps = [step for step in catalog.committed_steps() if only in (None, step)]
        if steps and stage.name:
            target.sidecars.write(f"{stage.name}.json", stage.to_json())
        place = storage_at(stage.inside(target.location)) if steps and stage.name else target
        num_found += len(steps)
        for step in steps:
            entry = catalog.find(step)
            with progress_bar(f"checkpoint-{step}", entry.manifest.total_bytes) as advance:
                is_new = copy_checkpoint(entry.storage, step, place, advance)
            what = "copied to" if is_new else "was there before, and is whole:"
            echo(f"checkpoint-{step}: {len(entry.manifest.files)} files {what} {place.describe(step)}")
    if not num_found:
        name = "checkpoint" if only is None else f"checkpoint-{only}"
        raise UsageError(f"there is no whole {name} at {location}; see `runner checkpoints list`")


@click.command()
@click.argument("location")
@click.argument("step", type=int)
@click.argument("directory", type=click.Path(path_type=Path))
def export(location: str, step: int, directory: Path) -> None:
    """Copy the checkpoint of STEP at LOCATION to DIRECTORY in Hugging Face layout.

    Every digest is compared. Where several stages of a run have a checkpoint of STEP, LOCATION is to be the stage's
    folder.
    """
    from checkpointing.commit.export import export_checkpoint

    entry = checkpoint_named(f"{location}/checkpoint-{step}")
    with progress_bar(f"checkpoint-{step}", entry.manifest.total_bytes) as advance:
        export_checkpoint(entry.storage, step, directory, advance)
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    echo(f"checkpoint-{step}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, in {directory}")
