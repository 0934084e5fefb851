"""Checks before a run is started, so that it resumes from nothing, and writes to nothing, of another job or run.

Nothing is changed before all checks have passed; `admit` then records what the next start will compare with.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import InvalidCheckpoint, StorageUnreachable
from checkpointing.format.layout import ANY_ADAPTER_NAMES, ANY_MODEL_NAMES
from checkpointing.host import limits, locking
from checkpointing.storage import Storage
from checkpointing.storage.durable import replace_file
from checkpointing.storage.object_store import StorageTimeout
from runner.config.load import load_recorded
from runner.config.schema import Config
from runner.errors import LaunchDelayed, RunBusy, RunnerError, StorageFailed, StorageFull, UsageError, unusable
from runner.journal.attempts import Job
from runner.journal.events import Entry, RunEnded, RunStarted
from runner.journal.journal import read_journal
from runner.journal.run_directory import RunDirectory, hold_lock
from runner.journal.summary import RunState
from runner.recovery.restart_state import RestartState
from runner.session import identity, location_id
from runner.session.admission import check_shares, counts_samples, samples_per_step
from runner.session.identity import JobIdentity, differences, summarised

# The agent has a lock file of its own there.
LOCK_NAME = ".supervisor.lock"
# A folder with one of these is a starting point, whether a stock Trainer wrote it or this project.
_WEIGHTS = (*ANY_MODEL_NAMES, *ANY_ADAPTER_NAMES)
_STATE = "trainer_state.json"
_RETRY_S = 1.0
# Of a run of one rank: runner, agent, launcher, fork server, and their threads; 2 ranks have 50 at most.
_FEWEST_PROCESSES = 24


@dataclass(frozen=True)
class StartRequest:
    """What a command line asks of `runner start`.

    Attributes:
        config: The resolved configuration.
        job: What to run.
        step: What to resume from: "auto", "never" or a step.
        overwrite: Whether to move an earlier run aside.
    """

    config: Config
    job: Job
    step: str | int = "auto"
    overwrite: bool = False

    @property
    def directory(self) -> RunDirectory:
        """The run's folder; nothing is created."""
        return RunDirectory(self.config.output_dir, self.config.launch.node_rank)


class LocationLock:
    """Makes this the only runner of the location until the process ends.

    A directory is locked like the run's folder. Object storage has no locks: there the restart state names the last
    runner, and a second one is refused while that runs on this node.
    """

    def __init__(self, config: Config, notify: Callable[[str], None], patience_s: float | None = None) -> None:
        self._storage, self._notify, self._patience_s = config.tiers.durable, notify, patience_s
        self._fd: int | None = None

    def release(self) -> None:
        """Give the lock back: another node leads the run."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def hold(self) -> None:
        """Take the lock, once more if the directory has been moved away since.

        Raises:
            RunBusy: Another runner on this node has it.
            OSError: The location cannot be written.
        """
        storage = self._storage
        if storage.root is not None:
            self.release()
            storage.root.mkdir(parents=True, exist_ok=True)
            what = f"keeps its checkpoints at {storage.root}"
            path, option = storage.root / LOCK_NAME, "checkpoint.location"
            self._fd, _ = hold_lock(path, what, option, self._notify, patience_s=self._patience_s)
            return
        if (holder := _holder_of(storage)) is not None:
            raise _busy(holder, f"keeps its checkpoints at {storage.location}", "checkpoint.location")


def _holder_of(storage: Storage) -> str | None:
    """Return the runner of this machine that works at a location; None if none does."""
    if storage.root is not None:
        return locking.held_by(storage.root / LOCK_NAME)
    runner = RestartState.from_json(storage.sidecars.read_restart_state()).runner
    return f"pid {runner.pid} on {runner.host}" if runner is not None and runner.is_alive_here else None


def _busy(holder: str, what: str, option: str) -> RunBusy:
    return RunBusy(f"another runner ({holder}) {what}; stop it first, or choose another {option}")


def check_not_busy(config: Config, directory: RunDirectory) -> None:
    """Refuse a folder or a location at which a runner of this machine works, and take no lock; raises RunBusy."""
    storage = config.tiers.durable
    if (holder := locking.held_by(directory.lock_path)) is not None:
        raise _busy(holder, f"works on {directory.root}", "--output-dir")
    if (holder := _holder_of(storage)) is not None:
        raise _busy(holder, f"keeps its checkpoints at {storage.location}", "checkpoint.location")


def compare_jobs(job: JobIdentity, recorded: Sequence[tuple[str, JobIdentity]], *, allow_changes: bool) -> list[str]:
    """Check that recorded jobs, each with where it was recorded, are this one; return what the user should know.

    Raises:
        UsageError: One of them is another job, and changes are not allowed.
    """
    notes = []
    for where, one in recorded:
        changes = differences(one, job)
        if changes and not allow_changes:
            raise UsageError(
                f"{where} holds checkpoints or results of another job ({summarised(changes)}); choose another "
                "--output-dir and checkpoint.location, start over with --resume never --overwrite, or pass "
                "--allow-changes if it is the same job after an edit"
            )
        if changes:
            notes.append(f"resuming at {where} although the job has changed ({summarised(changes)})")
    return notes[:1]


def examine(config: Config, directory: RunDirectory, job: JobIdentity, *, allow_changes: bool) -> list[str]:
    """Check that folder and location hold this job, and all that it has committed; return what the user should know.

    Raises:
        UsageError: They hold another job, or the ranks cannot share the samples of its steps.
        CheckpointsMissing: The location is another one than before, or empty.
        OSError: Storage refused.
    """
    tiers, entries = config.tiers, read_journal(directory.journal)
    remembered = location_id.remember(entries, tiers.name(tiers.durable))
    in_folder = recorded_in(directory)
    recorded = []
    for storage in tiers.nearest_first:
        if storage.steps() or storage.quarantined():
            known = JobIdentity.from_json(storage.sidecars.read(identity.RECORD_NAME)) or in_folder
            recorded += [(storage.location, known)] if known is not None else []
    if in_folder is not None and (remembered.step is not None or has_finished(entries)):
        recorded.append((str(directory.root), in_folder))
    notes = compare_jobs(job, recorded, allow_changes=allow_changes)
    launch = config.launch
    # The supervisor checks `auto` once torch has counted the accelerators: no other tool counts all kinds.
    # Virtual ranks are shared by any number of ranks.
    must_divide = config.elastic.mode != "exact"
    if must_divide and isinstance(launch.nproc_per_node, int) and launch.world_size is None:
        samples = samples_per_step(tiers.catalog)
        record = RestartState.from_json(tiers.durable.sidecars.read_restart_state())
        if samples is not None and counts_samples(job, record):
            nodes = range(launch.min_nodes or launch.nnodes, launch.nnodes + 1)
            ranks = [number * launch.nproc_per_node for number in nodes]
            is_bundled = job.what["job"] == "the configured job"
            together = config.model_ranks if is_bundled else record.batch.model_ranks
            try:
                check_shares(samples, *ranks, model_ranks=together)
            except UsageError as error:
                if record.batch.samples is None:
                    raise
                raise UsageError(f"{error}. A script with virtual ranks needs --set elastic.mode=exact") from None
    note = location_id.compare(remembered, location_id.look(tiers, remembered.step), tiers.durable.location)
    return [*notes, *([note] if note is not None else [])]


def admit(config: Config, directory: RunDirectory, job: JobIdentity) -> str:
    """Record the job in the run's folder and at every tier; return the id of the location, which it is given.

    Raises:
        OSError: The folder or a storage refused.
    """
    earlier = recorded_in(directory)
    if earlier is not None and not differences(earlier, job):
        job = job.completed_by(earlier)
    text = job.to_json()
    for storage in config.tiers.nearest_first:
        if storage.sidecars.read(identity.RECORD_NAME) != text:
            storage.sidecars.write(identity.RECORD_NAME, text, private=True)
    write_job(directory, job)
    return location_id.ensure_id(config.tiers.durable)


def write_job(directory: RunDirectory, job: JobIdentity) -> None:
    """Record the job in the folder of this node alone."""
    temporary = directory.job.with_name(f".{directory.job.name}.tmp")
    replace_file(directory.job, job.to_json(), temporary, private=True)


def recorded_in(directory: RunDirectory) -> JobIdentity | None:
    """Return the job that is recorded in a run's folder; None if there is none."""
    with contextlib.suppress(OSError):
        return JobIdentity.from_json(directory.job.read_bytes())
    return None


def has_finished(entries: Sequence[Entry]) -> bool:
    """Return whether the last session of a journal has trained to the end."""
    ends = [entry.event for entry in entries if isinstance(entry.event, RunStarted | RunEnded)]
    last = ends[-1] if ends else None
    return isinstance(last, RunEnded) and last.state == RunState.FINISHED.value


def is_done(config: Config, directory: RunDirectory, job: JobIdentity) -> bool:
    """Return whether the run in this folder has finished this very job with the same settings and location."""
    entries, recorded = read_journal(directory.journal), recorded_in(directory)
    if recorded is None or not has_finished(entries) or differences(recorded, job) or recorded.settings != job.settings:
        return False
    locations = [entry.event.location for entry in entries if isinstance(entry.event, RunStarted)]
    return locations[-1:] == [_absolute(config).checkpoint_location]


def starting_point(path: str) -> str:
    """Check the folder of `--resume-from`; returns its absolute path.

    Raises:
        UsageError: It does not exist, or is not a checkpoint.
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


def initial_folder(path: str) -> str:
    """Check the folder of `--init-from`; returns its absolute path.

    Raises:
        UsageError: It does not exist, or holds no weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"--init-from {path!r}: no such folder; give the folder of a model or a checkpoint")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise UsageError(f"--init-from {path!r}: it holds none of {', '.join(_WEIGHTS)}")
    return str(folder.absolute())


def was_in_use(config: Config, directory: RunDirectory) -> bool:
    """Return whether the last start in this folder used the same storage, which then is no mistake."""
    try:
        recorded = load_recorded(directory.config)
    except RunnerError:
        return False
    before, now = ((one.checkpoint_location, one.checkpoint.local_tier) for one in (recorded, _absolute(config)))
    return before == now


def _absolute(config: Config) -> Config:
    copied = config.model_copy(deep=True)
    copied.make_absolute()
    return copied


def check_processes() -> None:
    """Refuse to begin where not even one rank can be started; raises LaunchDelayed."""
    if limits.room_for_processes() < _FEWEST_PROCESSES:
        raise LaunchDelayed(
            f"a run needs at least {_FEWEST_PROCESSES} processes and threads{limits.explained(limits.NO_THREAD)}"
        )


def check_storage(config: Config) -> tuple[list[str], bool]:
    """Try what the run will need of its storage, before anything is started.

    Returns:
        What the user should know about the locations, and whether the durable one does not answer: the run then resumes
        from its local tier.

    Raises:
        UsageError: A location cannot be used; the text says why.
        StorageFailed: Its file system does not work now.
        StorageFull: There is no room.
        StorageUnreachable: The durable tier does not answer, and there is no local tier to resume from.
    """
    tiers, caveats, is_away = config.tiers, [], False
    for storage in tiers.nearest_first:
        try:
            caveats.append(storage.probe())
        except OSError as error:
            key = "checkpoint.location" if storage is tiers.durable else "checkpoint.local_tier"
            text = f"{key}={storage.location!r} cannot be used: {error.strerror or error}"
            if not isinstance(error, StorageTimeout):
                raise unusable(text, error) from None
            if tiers.local is None or not tiers.local.steps():
                raise StorageUnreachable(f"{text}; start again when it answers") from None
            is_away = True
            caveats.append(f"{text}; resuming from {tiers.local.location}; uploads follow when it answers")
    return [caveat for caveat in caveats if caveat is not None], is_away


def await_storage(
    config: Config,
    notify: Callable[[str], None],
    *,
    patience_s: float,
    follows: bool = False,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[str], bool]:
    """Return what `check_storage` does, for storage that this run was using before.

    That it does not work or answer now is no mistake of the user's, and may pass: it is tried again every second, for
    `patience_s` seconds; `notify` is called once. A process that `follows` was using it, and its run goes on elsewhere:
    it waits for room and permissions, too.

    Raises:
        RunnerError: As `check_storage`.
    """
    deadline, is_silent = clock() + patience_s, True
    while True:
        try:
            return check_storage(config)
        except (StorageUnreachable, StorageFailed, UsageError) as error:
            stays = isinstance(error, StorageFull | UsageError) and not follows
            # A try may itself take a minute.
            if stays or clock() >= deadline:
                raise
            if is_silent:
                notify(f"{error}; trying again for {patience_s:.0f} s")
            is_silent = False
            wait(_RETRY_S)


def has_earlier_run(config: Config, directory: RunDirectory, *, overwrite: bool) -> bool:
    """Return whether a new run finds an earlier one, which is to be moved aside.

    Raises:
        UsageError: It may not or cannot be moved.
    """
    durable = config.tiers.durable
    has_steps = any(storage.steps() for storage in config.tiers.nearest_first)
    if not has_steps and not directory.journal.exists():
        return False
    if not overwrite:
        raise UsageError(
            f"--resume never: {directory.root} already contains a run; add --overwrite to move it aside, or choose "
            "another --output-dir"
        )
    if durable.root is None and durable.steps():
        raise UsageError(
            f"--overwrite: {durable.location} contains checkpoints, and an object store cannot move them; choose "
            "another checkpoint.location, or remove them"
        )
    return True


def check_resume_step(config: Config, step: int) -> list[str]:
    """Prepare `--resume STEP`: verify the step, and rename newer checkpoints; return where these are kept.

    Raises:
        UsageError: The step is not committed (the text lists those that are), or its files are damaged.
    """
    tiers = config.tiers
    try:
        tiers.catalog.verify(step)
    except InvalidCheckpoint as error:
        raise UsageError(f"--resume {step}: {error}") from None
    return [
        storage.quarantine(newer, "superseded")
        for storage in tiers.nearest_first
        for newer in storage.steps()
        if newer > step
    ]
