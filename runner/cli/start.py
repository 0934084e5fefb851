"""The command `runner start`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from checkpointing.host.threads import in_background
from runner.cli.options import Number, config_options, load, run_directory_of
from runner.errors import ExitCode, RunBusy, UsageError
from runner.ranks.output import drain_streams, make_streams_lossy

if TYPE_CHECKING:
    from runner.lease.leadership import Inherited
    from runner.lease.record import LeaseRecord

T = TypeVar("T")
# Set where the process continues as a node that follows; its value does not matter.
_FOLLOWS_ENV = "_RUNNER_FOLLOWS"


@click.command(context_settings={"allow_interspersed_args": False})
@config_options
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|STEP",
    help="Checkpoint to resume from: auto selects the newest valid one, never starts from the beginning.",
)
@click.option(
    "--overwrite", is_flag=True, help="With --resume never: move an existing run aside instead of refusing to start."
)
@click.option(
    "--resume-from",
    metavar="PATH",
    help="Checkpoint of another run, or of a stock Trainer, to start from while this run has no checkpoint.",
)
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Resume from the checkpoints of a job that differs from this one, for example by an edited script.",
)
@click.option(
    "--max-restarts",
    type=int,
    metavar="N",
    help="Maximum number of restarts without a new checkpoint between them (default: 5).",
)
@click.option(
    "--grace",
    type=Number(min=0),
    metavar="SECONDS",
    help="Seconds that ranks may take to checkpoint after a stop request (default: 60).",
)
@click.option(
    "--metrics-port",
    type=int,
    metavar="PORT",
    help="Port on the leading node that serves Prometheus metrics at /metrics (default: none).",
)
@click.option(
    "--cold", is_flag=True, default=None, help="Start ranks in fresh interpreters instead of forks of a preloaded one."
)
@click.option(
    "--debug", is_flag=True, help="Run a scaled-down job with verbose logging, in a folder of its own (DIR-debug)."
)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def start(
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    resume: str,
    overwrite: bool,
    resume_from: str | None,
    allow_changes: bool,
    max_restarts: int | None,
    grace: float | None,
    metrics_port: int | None,
    debug: bool,
    script: str | None,
    args: tuple[str, ...],
    **launch: Any,
) -> None:
    """Run a training job to completion; restart it after failures.

    Without SCRIPT, run the configured supervised fine-tuning. With SCRIPT and its ARGS, run your own training script as
    torchrun would; to be resumable, the script saves through checkpointing.CheckpointManager or
    checkpointing.transformers.resilient.
    """
    from runner.system.event_loop import StopRequest

    # Only `start` survives the loss of its terminal or pipe; `status --watch | head` should end.
    make_streams_lossy()
    # Signals are counted from here on, so that a stop request before the first attempt is not lost.
    stop = StopRequest()
    stop.count_signals()

    from runner.journal.attempts import Job
    from runner.journal.summary import render
    from runner.lease.leader_choice import LeaderChoice, take_over
    from runner.lease.leadership import Takeover
    from runner.session import preflight
    from runner.session.excluded_machines import check_own_machine
    from runner.session.identity import between_nodes, identify
    from runner.session.session import Session
    from runner.supervisor.follower import Follower
    from runner.supervisor.supervisor import Supervisor
    from runner.system.cache import discard_unsealed
    from runner.ui.progress import ProgressDisplay

    restart = {"max_restarts": max_restarts, "grace_s": grace}
    if metrics_port is not None:
        settings = (*settings, f"monitoring.port={metrics_port}")
    config = load(config_path, output_dir, settings, launch, restart, script)
    if script is not None and not Path(script).is_file():
        raise UsageError(f"script {script!r} does not exist; pass the path of a Python file")
    if debug:
        from runner.config.debug import debugging_environment, for_debugging
        from runner.system.gpus import find_gpus

        if script is not None:
            raise UsageError(f"--debug cannot scale down a script; pass smaller sizes to {script} by its own options")
        if resume not in ("auto", "never"):
            raise UsageError(f"--debug always starts from scratch, in its own folder; remove --resume {resume}")
        gpus = find_gpus()
        config, resume, overwrite = for_debugging(config, len(gpus)), "never", True
        os.environ.update(debugging_environment(os.environ, on_gpu=bool(gpus)))
    follows = os.environ.pop(_FOLLOWS_ENV, None) is not None
    if follows:
        # The run that this process has led goes on.
        resume, overwrite = "auto", False
    step = resume_step(resume)
    if overwrite and step != "never":
        raise UsageError("--overwrite needs --resume never")
    starting_point = preflight.starting_point(resume_from) if resume_from is not None else ""

    def say(text: str) -> None:
        click.echo(f"runner: {text}")

    directory = run_directory_of(config)
    directory.create()
    directory.lock(say, lambda: bool(stop))
    identity = _unless_stopped(stop, lambda: identify(config, script, args))
    if step == "auto" and preflight.is_done(config, directory, identity):
        say("this run is finished; nothing to do (--resume never --overwrite starts a new run)")
        click.echo(render(summary_of_run(directory), paths_of(config, directory)))
        return
    usable = functools.partial(preflight.check_storage, config)
    if follows or preflight.was_in_use(config, directory):
        patience_s = config.launch.rendezvous_timeout_s
        usable = functools.partial(preflight.await_storage, config, say, patience_s=patience_s, follows=follows)
    caveats, is_away = _unless_stopped(stop, usable)
    choice = _unless_stopped(stop, lambda: LeaderChoice(config, directory, forced=step != "auto"))
    location_id: str | None = None
    lock = preflight.LocationLock(config, say, None if directory.is_locked else 0.0)
    if choice.leads and not is_away:
        _unless_stopped(stop, lambda: check_own_machine(config, time.time()))
    if not choice.leads:
        preflight.write_job(directory, identity)
    elif not is_away or step != "auto":
        # The location belongs to the whole run, so the leader's runner checks and prepares it.
        _unless_stopped(stop, lock.hold)
        if step == "never":
            if _start_over(config, directory, overwrite):
                lock.hold()
        else:
            check = functools.partial(preflight.examine, config, directory, identity, allow_changes=allow_changes)
            caveats += _unless_stopped(stop, check)
        if isinstance(step, int):
            for kept in preflight.check_resume_step(config, step):
                say(f"checkpoint newer than step {step} kept as {kept}")
        location_id = preflight.admit(config, directory, identity)
    keeper = choice.take()
    if not choice.leads:
        lock.release()
    if config.launch.node_rank == 0:
        discard_unsealed(directory.cache)
    # A restart, or a script that changes its working directory, must find the same paths.
    config.make_absolute()
    directory.write_config(config.to_yaml())
    display = ProgressDisplay(quiet=not choice.leads, live=script is None and not debug)
    job = Job(
        str(Path(script).absolute()) if script is not None else None,
        args,
        show_output=script is not None or debug,
        resume_from=starting_point,
        allow_changes=allow_changes,
    )
    display.message(f"run {directory.run_id()} in {directory.root}, resume {resume}")
    for caveat in [*caveats, *([choice.caveat] if choice.caveat is not None else [])]:
        display.message(caveat)
    shared = between_nodes(identity, config.checkpoint.location)
    session = Session(config, directory, display, stop)

    def ended(supervisor: Supervisor, exit_code: ExitCode) -> ExitCode:
        """Report the end of a run that this node has led, or follow the node that leads now."""
        if supervisor.was_replaced and not stop:
            say(f"{supervisor.reason}; this node follows it")
            _follow()
        return _report(supervisor, exit_code, config, directory)

    def lead(lease: LeaseRecord, inherited: Inherited) -> ExitCode:
        """Lead from now on: the leader that this node has followed is gone."""
        keeper = take_over(session, lease)
        try:
            with contextlib.suppress(RunBusy):
                # A leader that hangs may have it yet; the lease says that it does not lead any more.
                preflight.LocationLock(config, say, 0.0).hold()
            location_id = preflight.admit(config, directory, identity)
        except OSError as error:
            # Since it has taken the lease, its storage has failed. Another node, or this one later, finds it stale.
            say(f"this node cannot lead: {config.checkpoint_location}: {error.strerror or error}; it follows")
            if inherited.node is not None:
                inherited.node.close()
            if not stop:
                _follow()
            return ExitCode.PREEMPTED
        _serve_metrics(config, directory)
        supervisor = Supervisor(
            session, job, location_id=location_id, identity=shared, lease=keeper, inherited=inherited
        )
        exit_code = supervisor.lead()
        display.close()
        return ended(supervisor, exit_code)

    if not choice.leads:
        takeover = Takeover(session, choice.watch(), lead)
        follower = Follower(session, job, identity=shared, compared=not allow_changes, takeover=takeover)
        sys.exit(int(follower.run()))
    _serve_metrics(config, directory)
    supervisor = Supervisor(session, job, location_id=location_id, identity=shared, lease=keeper)
    sys.exit(int(ended(supervisor, supervisor.run())))


def _serve_metrics(config: Any, directory: Any) -> None:
    """Serve the metrics of a run that this node leads, if they are wanted."""
    if config.monitoring.port is None:
        return
    from runner.ui.prometheus import RunCollector, serve

    # With one node, only local processes may connect, unless the user sets an address.
    address = config.monitoring.address or ("127.0.0.1" if config.launch.nnodes == 1 else "0.0.0.0")
    serve(address, config.monitoring.port, RunCollector(directory.journal))


def _follow() -> None:
    """Run the same command again in this process, as a scheduler would do after exit code 75.

    What a leader has set up, from its lock to its metrics, ends with it.
    """
    os.environ[_FOLLOWS_ENV] = "1"
    drain_streams()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _report(supervisor: Any, exit_code: ExitCode, config: Any, directory: Any) -> ExitCode:
    """Print how a run has ended."""
    from runner.journal.summary import render

    summary = summary_of_run(directory)
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
    return exit_code


def _unless_stopped(stop: Any, work: Callable[[], T]) -> T:
    """Return the result of a check that may take a minute if a server does not answer.

    A stop request ends the wait and the process.

    Args:
        stop: The stop request.
        work: The check.
    """
    outcome = in_background(work, "check")
    while not stop:
        try:
            return outcome.result(timeout=0.05)
        except TimeoutError:
            if outcome.done():
                raise
    click.echo("runner: stopped before the first attempt")
    drain_streams()
    # A normal exit would join the thread, which may still wait for a server.
    os._exit(int(ExitCode.PREEMPTED))


def resume_step(text: str) -> str | int:
    """Parse the value of `--resume`: auto, never, or a step.

    Raises:
        UsageError: It is none of them.
    """
    if text in ("auto", "never"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"--resume {text!r} is not allowed; use auto, never, or the number of a committed step")


def _start_over(config: Any, directory: Any, overwrite: bool) -> bool:
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


def summary_of_run(directory: Any) -> Any:
    """Return the `RunSummary` of a run's folder."""
    from runner.journal.journal import read_journal
    from runner.journal.summary import summarise

    return summarise(read_journal(directory.journal), now=time.time())


def paths_of(config: Any, directory: Any) -> dict[str, str]:
    """Return what a run leaves, by name: the paths that exist, and URLs."""
    paths = {
        "best model": str(directory.best_model),
        "checkpoints": config.checkpoint_location,
        **({"local tier": config.checkpoint.local_tier} if config.checkpoint.local_tier else {}),
        "journal": str(directory.journal),
        "logs": str(directory.logs),
    }
    return {name: path for name, path in paths.items() if "://" in path or Path(path).exists()}
