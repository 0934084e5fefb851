"""What is checked before a run is started, so that nothing of another job or run is resumed from or written to.

Nothing is changed here before all checks have passed; `admit` then writes down what the next start will compare with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.manifest import Manifest
from checkpointing.storage import LocalStorage
from checkpointing.storage.durable import replace_file
from runner.config.schema import Config
from runner.errors import RunBusy, UsageError
from runner.journal.journal import Event, read_journal
from runner.journal.run_directory import RunDirectory, hold_lock
from runner.recovery.restart_state import RunRecord
from runner.supervisor import identity, place
from runner.supervisor.identity import JobIdentity, differences, summarised

# The agent has a lock of its own beside it.
LOCK_NAME = ".supervisor.lock"
# What a folder must hold to be a starting point, ours or a stock Trainer's.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_STATE = "trainer_state.json"


class LocationLock:
    """Makes this the only runner of the location, until the process ends.

    A directory is locked like the run's folder. In object storage there is no lock; there the note beside the
    checkpoints names the last runner, and it is refused to start beside one that lives on this machine.
    """

    def __init__(self, config: Config, tell: Callable[[str], None], patience_s: float | None = None) -> None:
        """`patience_s`: See `hold_lock`."""
        self._storage, self._tell, self._patience_s = config.tiers.durable, tell, patience_s
        self._fd: int | None = None

    def hold(self) -> None:
        """Take it; taken again where the directory was moved away since.

        Raises:
            RunBusy: another runner of this machine has it.
            OSError: the location cannot be written.
        """
        storage = self._storage
        if isinstance(storage, LocalStorage):
            if self._fd is not None:
                os.close(self._fd)
            storage.root.mkdir(parents=True, exist_ok=True)
            what = f"keeps its checkpoints at {storage.root}"
            path, option = storage.root / LOCK_NAME, "checkpoint.location"
            self._fd, _ = hold_lock(path, what, option, self._tell, patience_s=self._patience_s)
            return
        runner = RunRecord.from_json(storage.read_note()).runner
        if runner is not None and runner.is_alive_here:
            raise RunBusy(
                f"another runner (pid {runner.pid} on {runner.host}) keeps its checkpoints at {storage.location}; stop "
                "it first, or choose another checkpoint.location"
            )


@dataclass(frozen=True)
class Recorded:
    """The job that a place's checkpoints or a folder's results are of; `where` it is written down."""

    job: JobIdentity
    where: str


def compare_jobs(job: JobIdentity, recorded: Sequence[Recorded], *, allow_changes: bool) -> list[str]:
    """See that it is the same job; returns what the user should know.

    Raises:
        UsageError: it is another one, and changes are not allowed.
    """
    notes = []
    for one in recorded:
        changes = differences(one.job, job)
        if changes and not allow_changes:
            raise UsageError(
                f"{one.where} holds checkpoints or results of another job ({summarised(changes)}); choose another "
                "--output-dir and checkpoint.location, start over with --resume never --overwrite, or pass "
                "--allow-changes if it is the same job after an edit"
            )
        if changes:
            notes.append(f"resuming at {one.where} although the job has changed ({summarised(changes)})")
    return notes[:1]


def examine(config: Config, directory: RunDirectory, job: JobIdentity, *, allow_changes: bool) -> list[str]:
    """See that the run's folder and location hold this job, and all that it has committed.

    Returns:
        What the user should know.

    Raises:
        UsageError: they hold another job, or the ranks cannot share the samples of its steps.
        CheckpointsMissing: the location is another place than before, or an empty one.
        OSError: storage refused.
    """
    tiers, events = config.tiers, read_journal(directory.journal)
    remembered = place.remember(events, tiers.name(tiers.durable))
    in_folder = recorded_in(directory)
    recorded = []
    for storage in tiers.nearest_first:
        if storage.steps() or storage.set_aside_names():
            known = JobIdentity.from_json(storage.read_record(identity.RECORD_NAME)) or in_folder
            recorded += [Recorded(known, storage.location)] if known is not None else []
    if in_folder is not None and (remembered.step is not None or has_finished(events)):
        recorded.append(Recorded(in_folder, str(directory.root)))
    notes = compare_jobs(job, recorded, allow_changes=allow_changes)
    launch = config.launch
    # `auto` is checked by the supervisor, once torch has counted the accelerators: no other tool counts all kinds.
    if launch.nproc_per_node != "auto" and launch.world_size is None:
        newest = next((entry.manifest for entry in tiers.catalog.scan() if entry.manifest is not None), None)
        if newest is not None and counts_samples(job, RunRecord.from_json(tiers.durable.read_note())):
            check_world_size(newest, launch.nnodes * launch.nproc_per_node)
    note = place.compare(remembered, place.look(tiers, remembered.step), tiers.durable.location)
    return [*notes, *([note] if note is not None else [])]


def admit(config: Config, directory: RunDirectory, job: JobIdentity) -> str:
    """Write down the job, in the folder and at every tier; returns the id of the location, which it is given if needed.

    Raises:
        OSError: the folder or a storage refused.
    """
    earlier = recorded_in(directory)
    if earlier is not None and not differences(earlier, job):
        job = job.completed_by(earlier)
    text = job.to_json()
    for storage in config.tiers.nearest_first:
        if storage.read_record(identity.RECORD_NAME) != text:
            storage.write_record(identity.RECORD_NAME, text)
    write_job(directory, job)
    return place.ensure_id(config.tiers.durable)


def write_job(directory: RunDirectory, job: JobIdentity) -> None:
    """Write the job down in the folder of this node alone."""
    replace_file(directory.job, job.to_json(), directory.job.with_name(f".{directory.job.name}.tmp"))


def counts_samples(job: JobIdentity, record: RunRecord) -> bool:
    """Whether a checkpoint's number of samples is of those that all ranks together have drawn.

    A script may count in its own way, unless it has said how its steps are cut.
    """
    return job.what["job"] == "the configured job" or record.batch.micro_batch is not None


def check_world_size(newest: Manifest | None, world_size: int) -> None:
    """That this many ranks can share the samples of the run's steps equally, as its first ones did.

    Args:
        newest: of the newest checkpoint; None where there is none.

    Raises:
        UsageError: they cannot; the text says which numbers can.
    """
    if newest is None or newest.step == 0:
        return
    samples = newest.samples_consumed // newest.step
    if samples % world_size:
        fitting = ", ".join(str(number) for number in range(1, samples + 1) if samples % number == 0)
        raise UsageError(
            f"a step of this run has {samples} samples, which {world_size} ranks cannot share equally; start {fitting} "
            "ranks in all (--nproc-per-node, --nnodes), or begin again in another --output-dir"
        )


def recorded_in(directory: RunDirectory) -> JobIdentity | None:
    """The job that the run in this folder is."""
    with contextlib.suppress(OSError):
        return JobIdentity.from_json(directory.job.read_bytes())
    return None


def has_finished(events: Sequence[Event]) -> bool:
    """Whether the last runner of this journal has trained to the end."""
    ends = [event for event in events if event["event"] in ("run_started", "run_ended")]
    return bool(ends) and ends[-1].get("state") == "finished"


def is_done(config: Config, directory: RunDirectory, job: JobIdentity) -> bool:
    """Whether the run in this folder has finished just this job, as far as it is to run, with the same location."""
    events, recorded = read_journal(directory.journal), recorded_in(directory)
    if recorded is None or not has_finished(events) or differences(recorded, job) or recorded.settings != job.settings:
        return False
    locations = [event["location"] for event in events if isinstance(event.get("location"), str)]
    absolute = config.model_copy(deep=True)
    absolute.make_absolute()
    return locations[-1:] == [absolute.checkpoint_location]


def starting_point(path: str) -> str:
    """Check the folder of `--resume-from`; returns its absolute path.

    Raises:
        UsageError: it is not there, or is not a checkpoint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"--resume-from {path!r}: no such folder; give the folder of a checkpoint")
    if not any((folder / name).is_file() for name in (*_WEIGHTS, _STATE)):
        inside = sorted(
            (one for one in folder.glob("checkpoint-*") if one.name.removeprefix("checkpoint-").isdigit()),
            key=lambda one: int(one.name.removeprefix("checkpoint-")),
        )
        hint = f"give one of the checkpoints in it, such as {inside[-1]}" if inside else "give a checkpoint's folder"
        raise UsageError(f"--resume-from {path!r}: it holds no model weights and no {_STATE}; {hint}")
    return str(folder.absolute())
