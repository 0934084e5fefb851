"""The commands that take a checkpoint elsewhere: `runner checkpoints copy`, `diff`, `export` and `push`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from runner.cli.locations import checkpoint_named, progress_bar, split_checkpoint, storage_at, tiers_of
from runner.cli.model_export import converter, in_a_process
from runner.cli.options import echo
from runner.errors import UsageError


@click.command()
@click.argument("source", metavar="CHECKPOINT_OR_LOCATION")
@click.argument("destination")
def copy(source: str, destination: str) -> None:
    """Copy a checkpoint (LOCATION/checkpoint-STEP), or all at a location, to DESTINATION, a folder or a URL.

    Every digest is compared. A copy is a checkpoint like any other: it appears whole or not at all, and training
    resumes from it. A command that was killed continues where it ended when it is given again. A checkpoint that
    DESTINATION has already is verified there; another one of the same step is never overwritten. What is kept is kept
    there, too, with its label.
    """
    from checkpointing.commit.checkpoint_copy import copy_checkpoint
    from checkpointing.commit.kept import keep, labels
    from checkpointing.commit.tiers import FIRST_STAGE

    location, only = split_checkpoint(source)
    target, first, num_found = storage_at(destination), tiers_of(location), 0
    parts = [(stage, tiers.catalog) for stage, tiers in [(FIRST_STAGE, first), *first.stages]]
    stages = [(stage, catalog, steps) for stage, catalog in parts if (steps := _steps(catalog, only))]
    _check_runs(first, stages, target)
    for stage, catalog, steps in stages:
        if stage.name and not target.sidecars.read(f"{stage.name}.json"):
            target.sidecars.create(f"{stage.name}.json", stage.to_json())
            _check_stage(stage, target)
        place = storage_at(stage.inside(target.location)) if stage.name else target
        num_found += len(steps)
        for step in steps:
            entry = catalog.find(step)
            with progress_bar(f"checkpoint-{step}", entry.manifest.total_bytes) as advance:
                is_new = copy_checkpoint(entry.storage, step, place, advance)
            if (label := labels(entry.storage, [entry.manifest]).get(step)) is not None:
                keep(place, entry.manifest, label)
            what = f"{len(entry.manifest.files)} files copied to" if is_new else "there already, and whole:"
            echo(f"checkpoint-{step}: {what} {place.describe(step)}")
    if not num_found:
        name = "checkpoint" if only is None else f"checkpoint-{only}"
        raise UsageError(f"there is no whole {name} at {location}; see `runner checkpoints list`")


def _steps(catalog: Any, only: int | None) -> list[int]:
    return [step for step in catalog.committed_steps() if only in (None, step)]


def _check_runs(first: Any, stages: list[tuple[Any, Any, list[int]]], target: Any) -> None:
    """Check that the destination has nothing of another run; raises as `check_destination`, or UsageError."""
    from checkpointing.commit.checkpoint_copy import check_destination
    from runner.recovery.restart_state import RestartState

    lineages = [
        RestartState.from_json(storage.sidecars.read_restart_state()).lineage for storage in (target, first.durable)
    ]
    for stage, catalog, steps in stages:
        if stage.name:
            _check_stage(stage, target)
        manifests = [entry.manifest for entry in catalog.entries() if entry.manifest is not None]
        place = storage_at(stage.inside(target.location)) if stage.name else target
        chosen = [one for one in manifests if one.step in steps]
        check_destination(chosen, manifests, place, lineage=lineages[0], known=lineages[1])


def _check_stage(stage: Any, target: Any) -> None:
    from checkpointing.commit.tiers import TrainingStage

    found = target.sidecars.read(f"{stage.name}.json")
    if found and TrainingStage.from_json(found) != stage:
        raise UsageError(
            f"{target.location} has another record of {stage.name}: it is of another run, or of a rerun with other "
            "steps; choose another destination"
        )


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each difference, one a line.")
def diff(a: str, b: str, as_json: bool) -> None:
    """Print what changed from checkpoint A to checkpoint B, and by how much.

    A and B are LOCATION/checkpoint-STEP, or a location, of which the newest checkpoint is taken. Tensors are compared
    bit by bit, in pieces: added, removed, of another type or shape, or by how much their values differ; so are the
    states of optimizer, scheduler and trainer. Times of the trainer's log are left out. Digests are compared of all
    that is read; files whose recorded digests are equal are not. What is in shards, or not on this machine, is put
    together in TMPDIR first.

    The exit code is 0 if they are equal, 1 if not.
    """
    from checkpointing.commit.export import readable_directory

    entries = [checkpoint_named(name) for name in (a, b)]
    digests = [{(file.name, file.digest) for file in entry.manifest.files} for entry in entries]
    is_sharded = any(entry.manifest.is_sharded for entry in entries)
    equal = set() if is_sharded else {name for name, _ in digests[0] & digests[1]}
    if digests[0] == digests[1]:
        sys.exit(0)
    with tempfile.TemporaryDirectory(prefix="runner-diff-") as scratch:
        folders = []
        for name, entry in zip("ab", entries, strict=True):
            with progress_bar(f"{name.upper()}: checkpoint-{entry.step}", entry.manifest.total_bytes) as advance:
                folders.append(
                    readable_directory(entry.storage, entry.step, Path(scratch, name), advance, equal.__contains__)
                )
        options = [*(f"--without={name}" for name in equal), *(["--json"] if as_json else [])]
        are_equal = in_a_process("checkpointing.files.differences", *map(str, folders), *options)
    sys.exit(0 if are_equal else 1)


@click.command()
@click.argument("location")
@click.argument("step", type=int)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--model-only", is_flag=True, help="Leave out what only training reads; the following options do, too.")
@click.option("--merge", is_flag=True, help="Merge the adapter into its base model, in memory for all of it.")
@click.option(
    "--base-model", metavar="MODEL", help="Base model to merge into (default: the one that the adapter names)."
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Type of the weights (default: as they are)."
)
@click.option("--max-shard-size", metavar="SIZE", help="Size of a file of weights at most (default: 5GB).")
@click.option("--gguf", is_flag=True, help="Convert to model.gguf in DIRECTORY, too, by llama.cpp's converter.")
@click.option(
    "--gguf-converter", metavar="PATH", help="Path of convert_hf_to_gguf.py (default: found in PATH); implies --gguf."
)
def export(location: str, step: int, directory: Path, **options: Any) -> None:
    """Copy the checkpoint of STEP at LOCATION to DIRECTORY in Hugging Face layout.

    Every digest is compared. What is in shards (FSDP2, ZeRO, tensor and pipeline parallelism) is put together. Where
    several stages of a run have a checkpoint of STEP, LOCATION is to be the stage's folder.

    With any option, DIRECTORY has the model alone, its configuration and its tokenizer: what `from_pretrained` reads.
    """
    from checkpointing.commit.export import export_checkpoint, export_model

    convert = converter(**options)
    entry = checkpoint_named(f"{location}/checkpoint-{step}")
    with progress_bar(f"checkpoint-{step}", entry.manifest.total_bytes) as advance:
        if convert is None:
            export_checkpoint(entry.storage, step, directory, advance)
        else:
            export_model(entry.storage, step, directory, convert, advance)
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    echo(f"checkpoint-{step}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, in {directory}")


@click.command()
@click.argument("checkpoint")
@click.argument("repository", metavar="REPO")
@click.option("--private", is_flag=True, help="Create the repository, private, where there is none.")
@click.option("--revision", metavar="BRANCH", help="Branch to commit to (default: main).")
@click.option("--model-only", is_flag=True, help="Leave out what only training reads.")
def push(checkpoint: str, repository: str, private: bool, revision: str | None, model_only: bool) -> None:
    """Commit CHECKPOINT to REPO (OWNER/NAME) on the Hugging Face Hub, in Hugging Face layout.

    CHECKPOINT is LOCATION/checkpoint-STEP, or a location, of which the newest checkpoint is taken. Every digest is
    compared first. It becomes one commit, whose description names the checkpoint: what is on the branch already is not
    pushed again, and after a kill the same command uploads what is missing. The token is that of `hf auth login`, or
    HF_TOKEN. What is in shards, or not on this machine, is put together in TMPDIR first.
    """
    from checkpointing.commit.export import readable_directory
    from checkpointing.format.layout import is_of_training
    from checkpointing.storage.hub_commit import push_files

    entry = checkpoint_named(checkpoint)
    manifest = entry.manifest
    without = is_of_training if model_only else lambda name: False
    marker = f"checkpoint {manifest.identity}" + (" (model only)" if model_only else "")
    with tempfile.TemporaryDirectory(prefix="runner-push-") as scratch:
        with progress_bar(f"checkpoint-{entry.step}", manifest.total_bytes) as advance:
            folder = readable_directory(entry.storage, entry.step, Path(scratch, "files"), advance, without)
        names = [file.name for file in manifest.files if not without(file.name)]
        if folder != entry.storage.directory(entry.step):
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        pushed = push_files(
            repository,
            {name: folder / name for name in names},
            title=f"checkpoint-{entry.step} of run {manifest.run_id}",
            marker=marker,
            creates_private=private,
            revision=revision,
        )
    what = f"{len(names)} files pushed to" if pushed.is_new else "was pushed before to"
    echo(f"checkpoint-{entry.step}: {what} {repository}, commit {pushed.commit}")
