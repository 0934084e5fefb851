"""Where a run's checkpoints are, as a command line names it: a run's folder, a folder of checkpoints, or a URL."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runner.errors import UsageError

_CHECKPOINT = re.compile(r"(?:(.*)/)?checkpoint-(\d{1,15})/?")


def split_checkpoint(name: str) -> tuple[str, int | None]:
    """Return the location and the step that `LOCATION/checkpoint-STEP` names; no step where it names a location."""
    one = _CHECKPOINT.fullmatch(name)
    if one is None:
        return name, None
    return "." if one[1] is None else one[1] or "/", int(one[2])


def checkpoint_named(name: str) -> Any:
    """Return the catalog's entry of `LOCATION/checkpoint-STEP`, or of a location's newest checkpoint.

    Raises:
        UsageError: There is none, or several stages of the run have one of that step.
        InvalidCheckpoint: It is not whole.
    """
    tiers, step = tiers_with(name)
    return tiers.catalog.find(step)


def tiers_with(name: str) -> tuple[Any, int]:
    """Return the tiers that have a checkpoint, and its step; raises as `checkpoint_named` does."""
    location, step = split_checkpoint(name)
    stages = stages_of(location)
    if step is None:
        steps = [(tiers, steps[-1]) for _, tiers in stages if (steps := tiers.catalog.committed_steps())]
        if not steps:
            raise UsageError(f"there is no checkpoint at {location}; see `runner checkpoints list`")
        return steps[-1]
    having = [tiers for _, tiers in stages if step in tiers.catalog.committed_steps()]
    if len(having) > 1:
        places = " or ".join(tiers.durable.location for tiers in having)
        raise UsageError(f"several stages have a checkpoint-{step}: name one in {places}")
    tiers = (having or [stages[0][1]])[0]
    tiers.catalog.find(step)
    return tiers, step


def storage_at(location: str) -> Any:
    """Open the storage that checkpoints are to be written to: a run's durable one, or a place that may be new."""
    from checkpointing.storage import open_storage

    if not location:
        raise UsageError("the destination is empty; name a folder or a URL")
    if split_checkpoint(location)[1] is not None:
        raise UsageError(f"{location} names a checkpoint; name the folder or the URL that is to contain it")
    try:
        config = config_of(location)
        if config is not None:
            return config.tiers.durable
        return open_storage(location)
    except ValueError as error:
        raise UsageError(str(error)) from None


def config_of(location: str) -> Any:
    """Return the configuration of the run in this folder; None if it is not a run's folder."""
    from runner.config.load import load_recorded

    root = Path(location.removeprefix("file://"))
    if not ((root / "config.yaml").is_file() and (root / "journal.jsonl").exists()):
        return None
    config = load_recorded(root / "config.yaml")
    config.move_to(root)
    return config


def stages_of(location: str, config: Any = None) -> list[tuple[str, Any]]:
    """Return name and tiers of each stage at a location; the first one has no name. See `tiers_of`."""
    first = tiers_of(location, config)
    return [("", first), *((stage.name, tiers) for stage, tiers in first.stages)]


def tiers_of(location: str, config: Any = None) -> Any:
    """Open the storage of a run by its folder, or a location of checkpoints; UsageError if it is neither."""
    from checkpointing.commit.tiers import open_tiers

    try:
        config = config or config_of(location)
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
def progress_bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yields a function that takes the number of bytes of each step."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
