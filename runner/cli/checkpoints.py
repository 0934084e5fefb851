"""The commands `runner checkpoints list`, `verify`, `export` and `prune`."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from runner.cli.options import run_directory_of
from runner.errors import UsageError


@click.group()
def checkpoints() -> None:
    """List, verify, export and prune checkpoints.

    LOCATION is the folder of a run, a folder of checkpoints, or a URL.
    """


@checkpoints.command("list")
@click.argument("location")
def list_checkpoints(location: str) -> None:
    """List the checkpoints at LOCATION, newest first.

    File sizes are checked; contents are checked only by `verify`.
    """
    from runner.text import duration

    first = _tiers(location)
    parts = [("", first), *((stage.name, tiers) for stage, tiers in first.stages)]
    if not any(tiers.catalog.entries() for _, tiers in parts):
        click.echo(f"no checkpoints at {location}")
        return
    click.echo(f"{'step':>8}  {'age':>12}  {'size':>12}  {'tier':<6}  state")
    for stage, tiers in parts:
        if stage:
            click.echo(f"{stage}:")
        for entry in tiers.catalog.entries():
            tier = tiers.name(entry.storage)
            if entry.manifest is None:
                click.echo(f"{entry.step:>8}  {'':>12}  {'':>12}  {tier:<6}  invalid: {entry.problem}")
                continue
            age = duration(time.time() - entry.manifest.created_at)
            size = f"{entry.manifest.total_bytes / 1e6:.1f} MB"
            click.echo(
                f"{entry.step:>8}  {age:>12}  {size:>12}  {tier:<6}  sizes ok (attempt {entry.manifest.attempt})"
            )


@checkpoints.command()
@click.argument("location")
@click.option("--step", type=int, metavar="N", help="Step of the only checkpoint to verify (default: all).")
def verify(location: str, step: int | None) -> None:
    """Read the checkpoints at LOCATION and compare every digest.

    The exit code is 1 if a checkpoint is damaged.
    """
    from checkpointing.catalog import verify as verify_copy
    from checkpointing.errors import InvalidCheckpoint
    from checkpointing.manifest import missing_member

    if step is None and (one := re.fullmatch(r"(.*)/checkpoint-(\d{1,15})/?", location)) is not None:
        location, step = one[1], int(one[2])
    first = _tiers(location)
    parts = [("", first), *((stage.name, tiers) for stage, tiers in first.stages)]
    found = [(stage, tiers, entry) for stage, tiers in parts for entry in tiers.catalog.entries()]
    found = [(stage, tiers, entry) for stage, tiers, entry in found if step in (None, entry.step)]
    if not found:
        name = "checkpoint" if step is None else f"checkpoint-{step}"
        raise UsageError(f"there is no {name} at {location}; see `runner checkpoints list`")
    damaged = 0
    for stage, tiers, entry in found:
        name = f"{entry.step:>8}  {tiers.name(entry.storage):<6}" + (f"  {stage}" if stage else "")
        try:
            if entry.manifest is None:
                raise InvalidCheckpoint(entry.storage.describe(entry.step), str(entry.problem))
            with _progress_bar(f"checkpoint-{entry.step}", entry.manifest.total_bytes) as advance:
                manifest = verify_copy(entry.storage, entry.step, advance)
            if (lacking := missing_member(file.name for file in manifest.files)) is not None:
                raise InvalidCheckpoint(entry.storage.describe(entry.step), f"{lacking} is not among its files")
            click.echo(f"{name}  ok       {len(manifest.files)} files, {manifest.total_bytes / 1e6:.1f} MB")
        except InvalidCheckpoint as error:
            if entry.manifest is not None and entry.step not in entry.storage.steps():
                click.echo(f"{name}  gone     removed by its run during verification")
                continue
            damaged += 1
            click.echo(f"{name}  INVALID  {error}")
    sys.exit(1 if damaged else 0)


@checkpoints.command()
@click.argument("location")
@click.argument("step", type=int)
@click.argument("directory", type=click.Path(path_type=Path))
def export(location: str, step: int, directory: Path) -> None:
    """Copy the checkpoint of STEP at LOCATION to DIRECTORY in Hugging Face layout.

    Every digest is compared.
    """
    from checkpointing.export import export_checkpoint

    entry = _tiers(location).catalog.find(step)
    assert entry.manifest is not None
    with _progress_bar(f"checkpoint-{step}", entry.manifest.total_bytes) as advance:
        manifest = export_checkpoint(entry.storage, step, directory, advance)
    click.echo(f"checkpoint-{step}: {len(manifest.files)} files, {manifest.total_bytes / 1e6:.1f} MB, in {directory}")


@checkpoints.command()
@click.argument("location")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    required=True,
    help="Number of newest checkpoints to keep.",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Interval, in steps, of checkpoints to keep besides (default: checkpoint.keep_every_steps of the run).",
)
def prune(location: str, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the newest checkpoints at LOCATION.

    Incomplete checkpoints are not counted and not removed. If LOCATION is the folder of a run, the checkpoints that its
    configuration keeps permanently stay as well: the best by `metric_for_best_model` and every multiple of
    `keep_every_steps`. The newest checkpoint whose digests match always stays.
    """
    from checkpointing.catalog import Catalog
    from checkpointing.catalog import verify as verify_copy
    from checkpointing.errors import InvalidCheckpoint
    from checkpointing.retention import Retention, best_by, steps_to_remove

    config = _config_of(location)
    retention = Retention()
    if config is not None:
        # The lock is held to the end: a running run prunes by itself, and none may start meanwhile.
        run_directory_of(config).lock(cancelled=lambda: True)
        metric, greater = best_by(config.best_metric, config.trainer.get("greater_is_better"))
        retention = replace(config.checkpoint.retention, best_metric=metric, greater_is_better=greater)
    retention = replace(retention, keep_last=keep_last, keep_every=keep_every or retention.keep_every)
    for storage in _tiers(location, config).nearest_first:
        manifests = {entry.step: entry.manifest for entry in Catalog(storage).entries() if entry.manifest is not None}
        superfluous = steps_to_remove(manifests.values(), retention)
        for step in sorted(manifests, reverse=True) if superfluous else ():
            superfluous = [other for other in superfluous if other != step]
            try:
                verify_copy(storage, step)
                break
            except InvalidCheckpoint as error:
                click.echo(f"damaged, kept: {error}")
        for step in superfluous:
            storage.remove(step)
            click.echo(f"removed {storage.describe(step)}")


def _config_of(location: str) -> Any:
    """Return the configuration of the run in this folder; None if it is not a run's folder."""
    from runner.config.load import load_config

    root = Path(location.removeprefix("file://"))
    if not ((root / "config.yaml").is_file() and (root / "journal.jsonl").exists()):
        return None
    config = load_config(str(root / "config.yaml"), {}, needs_data=False)
    config.move_to(root)
    return config


def _tiers(location: str, config: Any = None) -> Any:
    """Open the storage of a run by its folder, or a location of checkpoints.

    Args:
        location: A run's folder, or the folder or URL of checkpoints.
        config: Configuration of the run, if it is known already.

    Raises:
        UsageError: It is neither.
    """
    from checkpointing.tiers import open_tiers

    try:
        config = config or _config_of(location)
        if config is not None:
            return config.tiers
        if location.startswith("file:///"):
            location = location.removeprefix("file://")
        root = Path(location)
        tiers = open_tiers(str(root / "checkpoints") if (root / "checkpoints").is_dir() else location)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not location or ("://" not in location and not root.is_dir()):
        raise UsageError(f"{location!r} is not a folder; pass a run's output_dir or its checkpoints folder")
    return tiers


@contextlib.contextmanager
def _progress_bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and remove it at the end.

    Args:
        name: What is transferred.
        total: Size in bytes.

    Yields:
        A function that takes the number of bytes of each step.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
