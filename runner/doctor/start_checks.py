"""What a start would do in this folder and at this location, as the start itself decides it, without doing it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.host.limits import room_for_processes
from runner.doctor.findings import Finding, fail, ok, warn
from runner.errors import (
    BadMachineError,
    CheckpointsMissing,
    LaunchDelayed,
    RunBusy,
    RunnerError,
    UsageError,
    with_path,
)
from runner.launcher.launch_request import variables_set_by
from runner.lease.leadership import LeaderChoice
from runner.program.nested_launchers import Nested
from runner.session import preflight
from runner.session.bad_machines import check_own_machine
from runner.session.identity import identify
from runner.session.preflight import StartRequest
from runner.session.webhook import signing_key

# Of a rank with its threads and DataLoader workers, and of the runner with its helpers.
_PER_RANK, _OF_RUNNER = 32, 32
_FIXES: dict[type[Exception], str] = {
    RunBusy: "stop that runner, or choose another folder or location",
    CheckpointsMissing: "restore the location",
    BadMachineError: "start on another machine, or reboot this one",
}


def describe(asked: StartRequest, nested: Nested | None, nnodes: int, nproc: int) -> Iterator[Finding]:
    """Say what would be run, where, and what a launcher in the command line says of ranks."""
    config = asked.config
    ranks = f"{nnodes * nproc} rank{'s' if nnodes * nproc > 1 else ''} on {nnodes} node{'s' if nnodes > 1 else ''}"
    where = f"{ranks}, output in {asked.directory.root}, checkpoints at {config.checkpoint_location}"
    if nested is None:
        yield ok("program", f"the configured job (data: {config.data.path or 'the bundled data'}), {where}")
        return
    program = nested.inner or nested.program
    yield ok("program", f"{program.kind} {program.label}, {where}")
    said = ", ".join(how for _, _, how in nested.settings)
    if nested.inner is not None or said:
        launcher = "the launcher" if nested.program == nested.inner else nested.program.label
        yield ok("launcher", f"{launcher} starts no ranks of its own; taken over: {said or 'nothing'}")
    if names := variables_set_by(nested.program):
        text = f"the program sets {', '.join(names[:3])}{', …' if names[3:] else ''}, which libraries read on import"
        yield warn("environment", f"{text}: each attempt starts some seconds later", "set them outside")


def check_processes(nproc: int) -> Iterator[Finding]:
    """Check that the container has room for the processes and threads of a run."""
    room, wanted = room_for_processes(), _OF_RUNNER + nproc * _PER_RANK
    try:
        preflight.check_processes()
    except LaunchDelayed as error:
        yield fail("processes", str(error), "raise the container's limit of processes (pids.max)")
        return
    if room < wanted:
        text = f"the container admits {room:.0f} more processes and threads; {nproc} ranks may need {wanted}"
        yield warn("processes", text, "raise its limit (pids.max; docker --pids-limit)")
    else:
        yield ok("processes", "no limit that matters" if room > 10**6 else f"room for {room:.0f} more")


def check_start(asked: StartRequest) -> Iterator[Finding]:
    """Say whether a start would begin, resume, or be refused, and with which text."""
    config, directory = asked.config, asked.directory
    try:
        signing_key(config.notify, os.environ)
        preflight.check_not_busy(config, directory)
        job = identify(config, asked.job.program)
        if asked.step == "auto" and preflight.is_done(config, directory, job):
            fix = "pass --resume never --overwrite for a new run"
            yield warn("start", "this run is finished with the same job and settings: a start has nothing to do", fix)
            return
        choice = LeaderChoice(config, directory, forced=asked.step != "auto")
        if not choice.leads:
            yield ok("start", f"node {config.launch.node_rank} follows the leader, which decides where to resume")
            return
        check_own_machine(config, time.time())
        notes = [] if choice.caveat is None else [choice.caveat]
        if asked.step == "never":
            if preflight.has_earlier_run(config, directory, overwrite=asked.overwrite):
                notes.append(f"the earlier run in {directory.root} is moved aside")
        else:
            notes += preflight.examine(config, directory, job, allow_changes=asked.job.allow_changes)
        yield from (warn("start", note, "make sure that this is meant") for note in notes)
        yield ok("start", _beginning(asked))
    except (RunnerError, CheckpointError, OSError) as error:
        text = with_path(error) if isinstance(error, OSError) else str(error)
        yield fail("start", f"would be refused: {text}", _FIXES.get(type(error), "correct what the text names"))


def _beginning(asked: StartRequest) -> str:
    """Return from where a start continues; UsageError if a step that was asked for is not committed."""
    catalog = asked.config.tiers.catalog
    if isinstance(asked.step, int):
        try:
            catalog.find(asked.step)
        except InvalidCheckpoint as error:
            raise UsageError(f"--resume {asked.step}: {error}") from None
        return f"would resume from step {asked.step}, and keep newer checkpoints under other names"
    steps = catalog.committed_steps() if asked.step == "auto" else []
    if steps:
        return f"would resume from step {steps[-1]}, the newest of {len(steps)} checkpoints"
    return f"would begin from {asked.job.resume_from}" if asked.job.resume_from else "would begin a new run"
