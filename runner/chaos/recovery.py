"""What follows an injected fault: waiting until the run notices it, continues, or is started again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from checkpointing.agent.events import Committed, Log, SnapshotTaken, TrainingStarted
from checkpointing.errors import CheckpointError
from runner.chaos import invariants
from runner.chaos.run_under_test import SETTLE_S
from runner.chaos.scene import JobPace, Moment, Scene
from runner.chaos.verdict import Injection
from runner.errors import ExitCode
from runner.journal.events import AttemptEnded, Backoff, Entry, RunEnded, RunStarted
from runner.recovery.kinds import FailureKind

# A run that shows no new step for this long after a fault counts as hung.
RECOVERY_LIMIT_S = 120.0
END_LIMIT_S = 90.0
_KILLED = -9
_PROGRESS = (Log, SnapshotTaken, Committed)


class RunOver(Exception):
    """The run has finished, or cannot continue."""


class RecoveryWatch:
    """Observes one run after each fault, as its user would: by the journal and by the exit code.

    It counts the starts of the runner (sessions), and the restarts of attempts that the faults so far have caused, for
    certain and at the most.
    """

    def __init__(self, scene: Scene, injections: Sequence[Injection], report: Callable[[str], None]) -> None:
        """Observe the run of a scene; the list of its injections grows meanwhile."""
        self._scene, self._injections, self._report = scene, injections, report
        self.sessions, self.min_restarts, self.max_restarts = 1, 0, 0

    def noticed(self, wanted: int) -> bool:
        """Wait until the journal has this many restarts in all; return False if the run continues without them."""
        run = self._scene.run
        if run.wait(lambda: num_restarts(run.entries) >= wanted or None, RECOVERY_LIMIT_S):
            return True
        code = run.process.poll()
        if code == ExitCode.DONE:
            # The fault hit a process whose work was committed already: its death then costs no restart.
            self.min_restarts -= wanted - num_restarts(run.entries)
        return code is not None

    def restart(self, injection: Injection, moment: Moment) -> None:
        """Wait for the runner to exit, and start it again as a scheduler would.

        Raises:
            RunOver: The run finished, or the runner did not exit as it should.
        """
        run = self._scene.run
        run.wait(lambda: None, END_LIMIT_S)
        code = run.process.poll()
        if code is None:
            injection.violations.append(f"the runner did not exit within {END_LIMIT_S:.0f} s")
            raise RunOver
        if code not in (ExitCode.PREEMPTED, ExitCode.DONE, _KILLED):
            injection.violations.append(f"the runner exited with {code}: {run.tail(500)}")
            raise RunOver
        injection.violations += invariants.exit_code_matches_journal(run.entries, run.process.pid, code)
        # An agent whose supervisor was killed first commits the complete snapshots that it holds.
        settle_s = END_LIMIT_S if code == _KILLED else SETTLE_S
        injection.violations += [f"left over: {left}" for left in run.leftovers(settle_s)]
        if code == ExitCode.DONE:
            raise RunOver
        if code == _KILLED:
            # A killed runner cannot remove its temporary files. The next session would start on another node or with
            # an empty /tmp, so they are no leak.
            for path in run.temporary.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        injection.violations += invariants.newest_is_intact(self._scene.tiers, self._scene.damaged)
        # A runner that was ended during start-up may not have written to the journal yet.
        in_journal = has_session(run.entries, run.process.pid)
        self.sessions += in_journal or moment not in (Moment.START_UP, Moment.RESTORE)
        run.start()
        self._report(f"exit code {code}, started again")

    def recovered(self, injection: Injection, attempt: int | None, events: int) -> None:
        """Wait for a step after the fault, at which the journal had this many events; see `has_progressed`.

        Raises:
            RunOver: The run does not continue, which is a violation.
        """
        run = self._scene.run
        if run.wait(lambda: has_progressed(run.entries, events, attempt) or None, RECOVERY_LIMIT_S):
            return
        code = run.process.poll()
        if code == ExitCode.DONE or self._stopped_by_full_disk(code):
            return
        how = f"the runner exited with {code}" if code is not None else f"no step within {RECOVERY_LIMIT_S:.0f} s"
        injection.violations.append(f"no recovery: {how}: {run.tail(800)}")
        raise RunOver

    def finish(self, pace: JobPace) -> tuple[bool, list[str]]:
        """Let the run end without further faults.

        Returns:
            Whether it finished with its last checkpoint, and the violations found.
        """
        run, found = self._scene.run, []
        limit_s = RECOVERY_LIMIT_S + 4 * pace.steps * pace.step_s
        run.wait(lambda: None, limit_s)
        code = run.process.poll()
        if self._stopped_by_full_disk(code):
            # Its last save met the full disk: a user makes room and starts the run again.
            self.sessions += 1
            run.start()
            self._report(f"exit code {code}, started again")
            run.wait(lambda: None, limit_s)
            code = run.process.poll()
        if code != ExitCode.DONE:
            ended = f"exited with {code}" if code is not None else f"did not exit within {limit_s:.0f} s"
            return False, [f"without further faults the runner {ended}: {run.tail(800)}"]
        found += invariants.exit_code_matches_journal(run.entries, run.process.pid, code)
        found += [f"left over: {left}" for left in run.leftovers()]
        try:
            steps = self._scene.tiers.catalog.committed_steps()
        except (CheckpointError, OSError) as error:
            return False, [*found, f"checkpoints cannot be read: {error}"]
        if not steps or steps[-1] != pace.steps:
            return False, [*found, f"the run finished, but its newest checkpoint is {steps[-1:]}"]
        return True, found + invariants.newest_is_intact(self._scene.tiers, set())

    def _stopped_by_full_disk(self, code: int | None) -> bool:
        faults = (injection.fault for injection in self._injections)
        return code == ExitCode.STORAGE_FAILED and any(fault.startswith("disk full") for fault in faults)


# -- what the journal says -----------------------------------------------------------------------------------------


def latest_step(entries: Sequence[Entry]) -> int:
    """Return the highest step that was logged, captured or committed; 0 before the first one."""
    return max((entry.event.step for entry in entries if isinstance(entry.event, _PROGRESS)), default=0)


def latest_attempt(entries: Sequence[Entry]) -> int:
    """Return the number of the newest attempt; 0 before the first one."""
    return max((entry.attempt for entry in entries), default=0)


def num_restarts(entries: Sequence[Entry]) -> int:
    """Return how many attempts followed a failed one."""
    return sum(isinstance(entry.event, Backoff) for entry in entries)


def num_saves_begun(entries: Sequence[Entry]) -> int:
    """Return how many snapshots were taken that are to be committed."""
    return sum(entry.event.to_be_committed for entry in entries if isinstance(entry.event, SnapshotTaken))


def is_halved(entries: Sequence[Entry]) -> bool:
    """Return whether the run halved its micro-batch after it ran out of memory."""
    ended = (entry.event for entry in entries if isinstance(entry.event, AttemptEnded))
    return any(event.kind == FailureKind.OUT_OF_MEMORY.value for event in ended)


def has_progressed(entries: Sequence[Entry], since: int, attempt: int | None) -> bool:
    """Return whether the run made a step since it had this many entries.

    With `attempt`, that attempt continues; without, the newest attempt must have begun since.
    """
    newer = entries[since:]
    if attempt is not None:
        return any(isinstance(entry.event, _PROGRESS) and entry.attempt >= attempt for entry in newer)
    newest = latest_attempt(entries)
    return any(isinstance(entry.event, TrainingStarted) for entry in newer) and any(
        isinstance(entry.event, _PROGRESS) and entry.attempt == newest for entry in newer
    )


def has_session(entries: Sequence[Entry], pid: int) -> bool:
    """Return whether the runner with this process id wrote to the journal."""
    return any(isinstance(entry.event, RunStarted) and entry.event.pid == pid for entry in entries)


def num_sessions_in_journal(entries: Sequence[Entry], sessions: int, pid: int) -> int:
    """Return how many sessions the journal should have: the last one, of `pid`, writes nothing about a finished run."""
    ended = [entry.event for entry in entries if isinstance(entry.event, RunEnded)]
    started = [entry.event for entry in entries if isinstance(entry.event, RunStarted)]
    was_finished = bool(ended) and ended[-1].state == "finished"
    return sessions - (was_finished and started[-1].pid != pid)
