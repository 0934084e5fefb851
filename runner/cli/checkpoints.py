"""The commands `runner checkpoints list`, `verify`, `keep`, `unkeep` and `prune`."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack, cast

import click

from checkpointing.commit.retention import FurtherRetention, Retention
from runner.cli.locations import config_of, progress_bar, split_checkpoint, stages_of, tiers_with
from runner.cli.options import echo
from runner.errors import UsageError

_LONGEST_LABEL = 200
F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def checkpoints() -> None:
    """List, verify, compare, keep, copy, export, push and prune checkpoints.

    LOCATION is the folder of a run, a folder of checkpoints, or a URL.
    """


@checkpoints.command("list")
@click.argument("location")
def list_checkpoints(location: str) -> None:
    """List the checkpoints at LOCATION, newest first, and which of them are kept, with their labels.

    File sizes are checked; contents are checked only by `verify`.
    """
    from checkpointing.commit.kept import labels
    from runner.system.text import duration

    stages = stages_of(location)
    if not any(tiers.catalog.entries() for _, tiers in stages):
        echo(f"no checkpoints at {location}")
        return
    echo(f"{'step':>8}  {'age':>12}  {'size':>12}  {'tier':<6}  state")
    for stage, tiers in stages:
        if stage:
            echo(f"{stage}:")
        entries = tiers.catalog.entries()
        kept = {
            storage.location: labels(
                storage, [one.manifest for one in entries if one.storage is storage and one.manifest is not None]
            )
            for storage in tiers.nearest_first
        }
        for entry in entries:
            tier = tiers.name(entry.storage)
            if entry.manifest is None:
                echo(f"{entry.step:>8}  {'':>12}  {'':>12}  {tier:<6}  invalid: {entry.problem}")
                continue
            age = duration(time.time() - entry.manifest.created_at)
            size = f"{entry.manifest.total_bytes / 1e6:.1f} MB"
            state = f"sizes ok (attempt {entry.manifest.attempt})"
            if (label := kept[entry.storage.location].get(entry.step)) is not None:
                state += f", kept: {label}" if label else ", kept"
            echo(f"{entry.step:>8}  {age:>12}  {size:>12}  {tier:<6}  {state}")


@checkpoints.command()
@click.argument("location")
@click.option("--step", type=int, metavar="N", help="Step of the only checkpoint to verify (default: all).")
def verify(location: str, step: int | None) -> None:
    """Read the checkpoints at LOCATION and compare every digest.

    The exit code is 1 if a checkpoint is damaged. Those that another program wrote are only named. One that was
    quarantined (checkpoint-N.invalid), and proves to be whole, gets its place back, unless training has gone on
    without it.
    """
    if step is None:
        location, step = split_checkpoint(location)
    for stage, tiers in stages_of(location):
        for line in _take_back(tiers, step):
            echo(f"{line}  {stage}".rstrip())
    found = [(stage, tiers, entry) for stage, tiers in stages_of(location) for entry in tiers.catalog.entries()]
    found = [(stage, tiers, entry) for stage, tiers, entry in found if step in (None, entry.step)]
    if not found:
        name = "checkpoint" if step is None else f"checkpoint-{step}"
        raise UsageError(f"there is no {name} at {location}; see `runner checkpoints list`")
    damaged = False
    for stage, tiers, entry in found:
        verdict = _verdict_of(entry)
        damaged |= verdict.startswith("INVALID")
        name = f"{entry.step:>8}  {tiers.name(entry.storage):<6}" + (f"  {stage}" if stage else "")
        echo(f"{name}  {verdict}")
    sys.exit(1 if damaged else 0)


def _verdict_of(entry: Any) -> str:
    """Read a checkpoint, and return what there is to say of it."""
    from checkpointing.commit.catalog import verify as verify_copy
    from checkpointing.errors import InvalidCheckpoint
    from checkpointing.format.manifest import missing_member

    if entry.is_foreign:
        return f"foreign  {entry.problem}"
    try:
        if entry.manifest is None:
            raise InvalidCheckpoint(entry.storage.describe(entry.step), str(entry.problem))
        with progress_bar(f"checkpoint-{entry.step}", entry.manifest.total_bytes) as advance:
            manifest = verify_copy(entry.storage, entry.step, advance)
        if (lacking := missing_member(file.name for file in manifest.files)) is not None:
            raise InvalidCheckpoint(entry.storage.describe(entry.step), f"{lacking} is not among its files")
    except InvalidCheckpoint as error:
        if entry.manifest is not None and entry.step not in entry.storage.steps():
            return "gone     removed by its run during verification"
        return f"INVALID  {error}"
    return f"ok       {len(manifest.files)} files, {manifest.total_bytes / 1e6:.1f} MB"


def _take_back(tiers: Any, only: int | None) -> Iterator[str]:
    """Give what was quarantined, and is whole, its place back; yield a line for each that is whole."""
    from checkpointing.commit.catalog import verify as verify_copy
    from checkpointing.errors import InvalidCheckpoint

    newest = max((entry.manifest.attempt for entry in tiers.catalog.entries() if entry.manifest is not None), default=0)
    for storage in tiers.nearest_first:
        for name in [name for name in storage.quarantined() if ".invalid" in name]:
            step = storage.take_back(name)
            if step is None:
                continue
            try:
                if only not in (None, step):
                    raise InvalidCheckpoint(name, "it was not asked for")
                manifest = verify_copy(storage, step)
            except InvalidCheckpoint:
                storage.quarantine(step)
                continue
            line = f"{step:>8}  {tiers.name(storage):<6}"
            if manifest.attempt < newest:
                storage.quarantine(step)
                yield f"{line}  whole    stays quarantined: attempt {newest} has gone on without it"
            else:
                yield f"{line}  back     it was quarantined, and is whole"


@checkpoints.command()
@click.argument("checkpoint")
@click.option("--label", default="", metavar="TEXT", help="What to call it in `list` (default: nothing).")
def keep(checkpoint: str, label: str) -> None:
    """Keep CHECKPOINT (LOCATION/checkpoint-STEP, or the newest of a location): no retention removes it.

    A run that lives honours that at once. `unkeep` leaves it to retention again.
    """
    from checkpointing.commit.kept import keep as keep_copy
    from checkpointing.commit.kept import unkeep as unkeep_copy

    if len(label) > _LONGEST_LABEL or "\n" in label:
        raise UsageError(f"--label: write at most {_LONGEST_LABEL} characters, in one line")
    tiers, step = tiers_with(checkpoint)
    manifest = tiers.catalog.find(step).manifest
    # The durable tier gets it even before the checkpoint: an upload may be under way.
    places = [storage for storage in tiers.nearest_first if storage is tiers.durable or storage.has_step(step)]
    for storage in places:
        keep_copy(storage, manifest, label)
    if step not in tiers.catalog.committed_steps():
        for storage in places:
            unkeep_copy(storage, step)
        raise UsageError(f"checkpoint-{step} at {tiers.durable.location} was removed meanwhile; keep another one")
    echo(f"checkpoint-{step} at {tiers.durable.location} is kept" + (f": {label}" if label else ""))


@checkpoints.command()
@click.argument("checkpoint")
def unkeep(checkpoint: str) -> None:
    """Leave CHECKPOINT (LOCATION/checkpoint-STEP) to retention again, also if it is not there any more."""
    from checkpointing.commit.kept import kept_steps
    from checkpointing.commit.kept import unkeep as unkeep_copy

    location, named = split_checkpoint(checkpoint)
    keeping = [
        tiers
        for _, tiers in stages_of(location)
        if any(named in kept_steps(storage) for storage in tiers.nearest_first)
    ]
    tiers, step = (keeping[0], named) if named is not None and len(keeping) == 1 else tiers_with(checkpoint)
    places = [storage for storage in tiers.nearest_first if step in kept_steps(storage)]
    for storage in places:
        unkeep_copy(storage, step)
    what = "is left to retention" if places else "was not kept"
    echo(f"checkpoint-{step} at {tiers.durable.location} {what}")


def _further_retention_options(command: F) -> F:
    """Add an option for each entry of `FurtherRetention`."""
    for field in reversed(dataclasses.fields(Retention)):
        if field.name in FurtherRetention.__annotations__:
            command = click.option(
                f"--{field.name.replace('_', '-')}",
                type=click.IntRange(min=1),
                metavar=field.metadata["metavar"],
                help=f"{field.metadata['help']} (default: as the run's configuration says).",
            )(command)
    return command


@checkpoints.command()
@click.argument("location")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", required=True, help="Number of newest checkpoints to keep."
)
@_further_retention_options
def prune(location: str, keep_last: int, **further: Unpack[FurtherRetention]) -> None:
    """Remove all but the newest checkpoints at LOCATION, of each stage if a run has several.

    Incomplete checkpoints are not counted and not removed. If LOCATION is the folder of a run, the checkpoints that its
    configuration keeps permanently stay as well, among them the best by `metric_for_best_model`. The newest checkpoint
    whose digests match always stays, and so does what `keep` has named.
    """
    from checkpointing.commit.catalog import Catalog
    from checkpointing.commit.catalog import verify as verify_copy
    from checkpointing.commit.kept import kept_of, remove_unless_kept
    from checkpointing.commit.retention import best_by, steps_to_remove
    from checkpointing.errors import InvalidCheckpoint
    from runner.journal.run_directory import RunDirectory

    config = config_of(location)
    metric, greater = None, False
    given: dict[str, Any] = {name: value for name, value in further.items() if value is not None}
    if config is not None:
        # The lock is held to the end: a running run prunes by itself, and none may start meanwhile.
        RunDirectory(config.output_dir, config.launch.node_rank).lock(cancelled=lambda: True)
        metric, greater = best_by(config.best_metric, config.trainer.get("greater_is_better"))
        given = {**config.checkpoint.further_retention, **given}
    retention = Retention(
        keep_last=keep_last, best_metric=metric, greater_is_better=greater, **cast(FurtherRetention, given)
    )
    for storage in (storage for _, tiers in stages_of(location, config) for storage in tiers.nearest_first):
        manifests = {entry.step: entry.manifest for entry in Catalog(storage).entries() if entry.manifest is not None}
        superfluous = steps_to_remove(
            manifests.values(), retention, functools.partial(kept_of, storage, manifests.values())
        )
        for step in sorted(manifests, reverse=True) if superfluous else ():
            superfluous = [other for other in superfluous if other != step]
            try:
                verify_copy(storage, step)
                break
            except InvalidCheckpoint as error:
                echo(f"damaged, kept: {error}")
        for step in superfluous:
            if remove_unless_kept(storage, manifests[step]):
                echo(f"removed {storage.describe(step)}")
