"""The commands `runner save` and `runner stop`, which ask a run that is running for something."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TypeVar

import click

from runner.cli.inspect import newest_run
from runner.errors import UsageError

if TYPE_CHECKING:
    from runner.journal.events import Entry

# A runner looks each second. One that waits for a file system answers later.
_PATIENCE_S = 20.0
_LOOK_EVERY_S = 0.1

E = TypeVar("E")


@click.command()
@click.argument("location", required=False)
@click.option("--wait", is_flag=True, help="Wait until the checkpoint is committed, and print where it is.")
def save(location: str | None, wait: bool) -> None:
    """Have a run make a checkpoint at its next step; training continues.

    LOCATION is the folder of the run (default: $OUTPUT_DIR, or the newest run in ./runs), on any machine that can
    write there. The same is asked for by SIGUSR2 to the runner, or by a file: touch LOCATION/requests/save.
    """
    from checkpointing.agent.events import Committed
    from checkpointing.storage.base import CHECKPOINT_PREFIX
    from runner.journal.events import RunStarted, SaveRequested
    from runner.session.requests import SAVE

    run = _AskedRun(location)
    run.ask(SAVE)
    request = run.first(SaveRequested, float("inf") if wait else _PATIENCE_S)
    if request is None and not wait:
        click.echo("runner: a checkpoint is requested; no rank takes steps now, and it is made once they do")
        return
    if request is None or not request.saves:
        reason = "nothing of this program is saved so far" if request is not None else "the run has ended before"
        click.echo(f"runner: error: no checkpoint is made: {reason}; see runner status", err=True)
        sys.exit(1)
    if not wait:
        click.echo(f"runner: step {request.step} has ended; a checkpoint is made at a later one (--wait waits for it)")
        return
    found = run.first(Committed, after=request.step)
    if found is None:
        click.echo("runner: error: the run ended before the checkpoint was committed; see runner status", err=True)
        sys.exit(1)
    places = [entry.event.location for entry in run.entries() if isinstance(entry.event, RunStarted)]
    click.echo(f"runner: {places[-1]}/{CHECKPOINT_PREFIX}{found.step} is committed ({found.tier})")


@click.command()
@click.argument("location", required=False)
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
def stop(location: str | None, wait: bool) -> None:
    """Have a run save its state and end, with the exit code 75; the same command continues it.

    LOCATION is the same as for `save`. SIGTERM to the runner, or touch LOCATION/requests/stop, asks for the same.
    """
    from runner.journal.events import RunEnded
    from runner.session.requests import STOP

    run = _AskedRun(location)
    run.ask(STOP)
    if not wait:
        click.echo("runner: stop requested; the ranks save and exit (--wait waits for it)")
        return
    run.first(RunEnded)
    click.echo(f"runner: {run.state}")


class _AskedRun:
    """A run that is running, and its journal.

    Raises:
        UsageError: There is none at the location, or it has ended.
    """

    def __init__(self, location: str | None) -> None:
        from runner.journal.journal import JournalReader
        from runner.journal.run_directory import RunDirectory

        where = location if location is not None else newest_run()
        if "://" in where:
            raise UsageError(f"{where!r} is not a folder; give the folder of the run, its --output-dir")
        self._folder = RunDirectory(where)
        self._reader = JournalReader(self._folder.journal)
        if not self.entries():
            raise UsageError(f"{where!r} holds no run; give the folder of one, its --output-dir")
        if self._is_over():
            raise UsageError(f"the run at {where} is not running ({self.state}); start it first")
        self._seen = len(self.entries())

    def ask(self, name: str) -> None:
        """Make the file of a request, and wait until the runner has taken it.

        Raises:
            UsageError: It has not.
        """
        file = self._folder.requests / name
        try:
            file.touch(0o600)
        except OSError as error:
            raise UsageError(f"{file} cannot be made: {error.strerror}; run this as the user of the run") from None
        deadline = time.monotonic() + _PATIENCE_S
        while file.exists():
            if time.monotonic() > deadline or self._is_over():
                file.unlink(missing_ok=True)
                raise UsageError(
                    f"no runner has taken the request; is one working on {self._folder.root}, and is that the same "
                    "folder as on its machine? With a folder for each node, give that of the leader"
                )
            time.sleep(_LOOK_EVERY_S)

    def first(self, kind: type[E], patience_s: float = float("inf"), *, after: int | None = None) -> E | None:
        """Wait for an event that is recorded from now on; None if the run ends before, or the time is over.

        Args:
            kind: Its class.
            patience_s: Seconds to wait.
            after: A step; the event is of a later one.
        """
        deadline = time.monotonic() + patience_s
        while True:
            # Asked first: what it records last may be what is wanted.
            is_over = self._is_over()
            events = [entry.event for entry in self.entries()[self._seen :] if isinstance(entry.event, kind)]
            found = next((one for one in events if after is None or getattr(one, "step", -1) > after), None)
            if found is not None or is_over or time.monotonic() > deadline:
                return found
            time.sleep(_LOOK_EVERY_S)

    def entries(self) -> list[Entry]:
        """Return what the journal holds by now."""
        return self._reader.entries()

    @property
    def state(self) -> str:
        """What the run is doing, or how it has ended."""
        from runner.journal.summary import summarise

        run = summarise(self.entries())
        state = run.state.value if run.state.is_over or not self._is_over() else "its runner is gone"
        return f"{state}: {run.reason}" if run.reason else state

    def _is_over(self) -> bool:
        from runner.ui.status import has_ended

        return has_ended(self.entries())
