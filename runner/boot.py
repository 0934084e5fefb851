"""What `runner start` does, in order."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click

from checkpointing.host.threads import in_background
from runner.config.schema import Config
from runner.errors import ExitCode, RunBusy
from runner.journal.attempts import Job
from runner.journal.events import Entry
from runner.journal.journal import read_journal
from runner.journal.run_directory import RunDirectory
from runner.journal.summary import RunSummary, render, summarise
from runner.launcher.launch_request import variables_set_by
from runner.lease.leadership import Inherited, LeaderChoice, Takeover, take_over
from runner.lease.lease import Lease, LeaseRecord
from runner.ranks.output import drain_streams
from runner.session import preflight
from runner.session.bad_machines import check_own_machine
from runner.session.identity import between_nodes, identify
from runner.session.notifications import Notifications
from runner.session.session import Session
from runner.session.webhook import Webhook, post, signing_key
from runner.supervisor.follower import Follower
from runner.supervisor.run_record import end_state
from runner.supervisor.supervisor import Supervisor
from runner.system.cache import discard_unsealed
from runner.system.event_loop import StopRequest
from runner.ui.progress import ProgressDisplay

T = TypeVar("T")
# Set where the process continues as a node that follows; its value does not matter.
FOLLOWS_ENV = "_RUNNER_FOLLOWS"
# Seconds that the end of a run may wait for the last notification.
_PATIENCE_S = 5.0


class Boot:
    """One `runner start`.

    Args:
        config: The resolved configuration.
        job: What to run.
        stop: Counts the stop requests of this process since its first moment.
        step: What to resume from: "auto", "never" or a step.
        overwrite: Whether to move an earlier run aside.
        follows: Whether the run that this process has led goes on under another leader.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        stop: StopRequest,
        *,
        step: str | int = "auto",
        overwrite: bool = False,
        follows: bool = False,
    ) -> None:
        # Ranks must find it from any working directory.
        program = job.program.from_anywhere() if job.program is not None else None
        self._config, self._job, self._stop = config, replace(job, program=program), stop
        self._step, self._overwrite, self._follows = step, overwrite, follows
        self._directory = RunDirectory(config.output_dir, config.launch.node_rank)
        self._caveats: list[str] = []
        self._location_id: str | None = None
        self._signing_key = signing_key(config.notify, os.environ)
        self._webhook: Webhook | None = None

    def run(self) -> ExitCode:
        """Run the job on this node, as the leader or as a follower; return the exit code of the process.

        Raises:
            RunnerError: The run cannot begin: the settings, the storage, the job or this machine are wrong.
        """
        preflight.check_processes()
        self._directory.create()
        self._directory.lock(_say, lambda: bool(self._stop))
        self._identity = unless_stopped(self._stop, lambda: identify(self._config, self._job.program))
        if self._step == "auto" and preflight.is_done(self._config, self._directory, self._identity):
            _say(
                "this run is finished; nothing to do: the job and its settings are the same, as far as they are known "
                "before the script runs (--resume never --overwrite starts a new run)"
            )
            click.echo(render(self._summary(), paths_of(self._config, self._directory)))
            return ExitCode.DONE
        is_away = self._reach_storage()
        self._choose_leader()
        self._prepare_location(is_away)
        lease = self._choice.take()
        if not self._choice.leads:
            self._lock.release()
        self._write_config()
        self._open_session()
        if not self._choice.leads:
            return self._follow()
        supervisor = self._supervisor(lease)
        return self._end(supervisor, supervisor.run())

    def _reach_storage(self) -> bool:
        """Check that the location can be used; return whether it cannot be reached for now."""
        config = self._config
        usable = functools.partial(preflight.check_storage, config)
        if self._follows or preflight.was_in_use(config, self._directory):
            patience_s = config.launch.rendezvous_timeout_s
            usable = functools.partial(
                preflight.await_storage, config, _say, patience_s=patience_s, follows=self._follows
            )
        self._caveats, is_away = unless_stopped(self._stop, usable)
        return is_away

    def _choose_leader(self) -> None:
        is_forced = self._step != "auto"
        self._choice = unless_stopped(self._stop, lambda: LeaderChoice(self._config, self._directory, forced=is_forced))
        self._lock = preflight.LocationLock(self._config, _say, None if self._directory.is_locked else 0.0)

    def _prepare_location(self, is_away: bool) -> None:
        """Check this machine and the location, and make room for the run; the leader's runner alone does that."""
        config, directory, step = self._config, self._directory, self._step
        if not self._choice.leads:
            preflight.write_job(directory, self._identity)
            return
        if not is_away:
            unless_stopped(self._stop, lambda: check_own_machine(config, time.time()))
        elif step == "auto":
            return
        unless_stopped(self._stop, self._lock.hold)
        if step == "never":
            if move_aside(config, directory, overwrite=self._overwrite):
                self._lock.hold()
        else:
            allow_changes = self._job.allow_changes
            check = functools.partial(preflight.examine, config, directory, self._identity, allow_changes=allow_changes)
            self._caveats += unless_stopped(self._stop, check)
        if isinstance(step, int):
            for kept in preflight.check_resume_step(config, step):
                _say(f"checkpoint newer than step {step} kept as {kept}")
        self._location_id = preflight.admit(config, directory, self._identity)

    def _write_config(self) -> None:
        if self._config.launch.node_rank == 0:
            discard_unsealed(self._directory.cache)
        # A restart, or a script that changes its working directory, must find the same paths.
        self._config.make_absolute()
        self._directory.write_config(self._config.to_yaml())

    def _open_session(self) -> None:
        directory = self._directory
        self._display = ProgressDisplay(quiet=not self._choice.leads, live=not self._job.show_output)
        self._display.message(f"run {directory.run_id()} in {directory.root}, resume {self._step}")
        if names := variables_set_by(self._job.program):
            listed = ", ".join(names[:3]) + (", …" if names[3:] else "")
            self._caveats.append(
                f"the program sets {listed}, which libraries read when they are imported: each attempt imports them "
                "again, and starts some seconds later (set them outside to avoid that)"
            )
        for caveat in [*self._caveats, *([self._choice.caveat] if self._choice.caveat is not None else [])]:
            self._display.message(caveat)
        self._shared_identity = between_nodes(self._identity, self._config.checkpoint.location)
        self._session = Session(self._config, directory, self._display, self._stop)

    def _follow(self) -> ExitCode:
        """Follow the leader, and lead the run once that one is gone."""
        takeover = Takeover(self._session, self._choice.watch(), self._take_over)
        identity, compared = self._shared_identity, not self._job.allow_changes
        return Follower(self._session, self._job, identity=identity, compared=compared, takeover=takeover).run()

    def _take_over(self, taken: LeaseRecord, inherited: Inherited) -> ExitCode:
        """Lead from now on: the leader that this node has followed is gone."""
        lease = take_over(self._session, taken)
        try:
            with contextlib.suppress(RunBusy):
                # A leader that hangs may have it yet; the lease says that it does not lead any more.
                preflight.LocationLock(self._config, _say, 0.0).hold()
            self._location_id = preflight.admit(self._config, self._directory, self._identity)
        except OSError as error:
            # Since it has taken the lease, its storage has failed. Another node, or this one later, finds it stale.
            location = self._config.checkpoint_location
            _say(f"this node cannot lead: {location}: {error.strerror or error}; it follows")
            if inherited.node is not None:
                inherited.node.close()
            if not self._stop:
                _start_again_as_follower()
            return ExitCode.PREEMPTED
        supervisor = self._supervisor(lease, inherited)
        exit_code = supervisor.lead()
        self._display.close()
        return self._end(supervisor, exit_code)

    def _supervisor(self, lease: Lease | None, inherited: Inherited | None = None) -> Supervisor:
        """Return the supervisor of a run that this node leads, and serve the run's metrics, if they are wanted."""
        config = self._config
        if config.monitoring.port is not None:
            from runner.ui.prometheus import RunCollector, serve

            serve(config.monitoring.address, config.monitoring.port, RunCollector(self._directory.journal))
        supervisor = Supervisor(
            self._session,
            self._job,
            location_id=self._location_id,
            identity=self._shared_identity,
            lease=lease,
            inherited=inherited,
        )
        if config.notify.url is not None:
            self._notify_of(supervisor)
        return supervisor

    def _notify_of(self, supervisor: Supervisor) -> None:
        """Have notifications sent of a run that this node leads, for as long as it does."""
        notify, session = self._config.notify, self._session
        webhook = self._webhook = Webhook(functools.partial(post, notify, self._signing_key), self._display.message)
        name = self._directory.root.name
        notifications = Notifications(session.run_id, name, socket.gethostname(), notify.events)

        def observe(entry: Entry) -> None:
            notification = notifications.take(entry)
            if notification is not None and not supervisor.was_replaced:
                webhook.put(notification)

        session.observers.append(observe)

    def _end(self, supervisor: Supervisor, exit_code: ExitCode) -> ExitCode:
        """Print how a run has ended that this node has led, or follow the node that leads now."""
        if self._webhook is not None:
            self._webhook.close(_PATIENCE_S)
        if supervisor.was_replaced and not self._stop:
            _say(f"{supervisor.reason}; this node follows it")
            _start_again_as_follower()
        try:
            summary = self._summary()
        except OSError as error:
            _say(f"no summary: {self._directory.journal}: {error.strerror or error}")
        else:
            if not summary.state.is_over:
                # The journal could not be written to its end.
                summary.state = end_state(exit_code)
            if summary.step > 0:
                click.echo(render(summary, paths_of(self._config, self._directory)))
            elif exit_code == ExitCode.DONE:
                _say("finished")
        if exit_code != ExitCode.DONE:
            # Not from the journal: it may have been moved away, or its disk may be full.
            state = "stopped" if exit_code == ExitCode.PREEMPTED else "failed"
            shown = supervisor.failed_log is not None and exit_code != ExitCode.PREEMPTED
            log = f"; log: {supervisor.failed_log}" if shown else ""
            _say(f"{state}: {supervisor.reason} (exit code {int(exit_code)}{log})")
        return exit_code

    def _summary(self) -> RunSummary:
        return summarise(read_journal(self._directory.journal), now=time.time())


def unless_stopped(stop: StopRequest, work: Callable[[], T]) -> T:
    """Return the result of a check that may take a minute if a server does not answer.

    A stop request ends the wait and the process.
    """
    outcome = in_background(work, "check")
    while not stop:
        try:
            return outcome.result(timeout=0.05)
        except TimeoutError:
            if outcome.done():
                raise
    _say("stopped before the first attempt")
    drain_streams()
    # A normal exit would join the thread, which may still wait for a server.
    os._exit(int(ExitCode.PREEMPTED))


def _say(text: str) -> None:
    click.echo(f"runner: {text}")


def _start_again_as_follower() -> None:
    """Run the same command again in this process, as a scheduler would do after exit code 75.

    What a leader has set up, from its lock to its metrics, ends with it.
    """
    os.environ[FOLLOWS_ENV] = "1"
    drain_streams()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
    if not preflight.has_earlier_run(config, directory, overwrite=overwrite):
        return False
    folders = [storage.root for storage in tiers.nearest_first if storage.root is not None]
    _say(f"moved the earlier run to {directory.move_aside(folders)}")
    return True


def paths_of(config: Config, directory: RunDirectory) -> dict[str, str]:
    """Return what a run leaves, by name: the paths that exist, and URLs."""
    paths = {
        "best model": str(directory.best_model),
        "checkpoints": config.checkpoint_location,
        **({"local tier": config.checkpoint.local_tier} if config.checkpoint.local_tier else {}),
        "journal": str(directory.journal),
        "logs": str(directory.logs),
    }
    return {name: path for name, path in paths.items() if "://" in path or Path(path).exists()}
