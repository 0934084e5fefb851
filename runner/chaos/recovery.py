"""What follows an injected fault: waiting until the run notices it, continues, or is started again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from checkpointing.errors import CheckpointError
from runner.chaos import invariants, run_progress
from runner.chaos.result import Injection
from runner.chaos.run_progress import Expected
from runner.chaos.run_under_test import SETTLE_S
from runner.chaos.scene import JobPace, Moment, Scene
from runner.errors import ExitCode

# A run that shows no new step for this long after a fault counts as hung.
RECOVERY_LIMIT_S = 120.0
END_LIMIT_S = 90.0
_KILLED = -9


class RunOver(Exception):
    """The run has finished, or cannot continue."""


class RecoveryWatch:
    """Observes one run after each fault, as its user would: by the journal and by the exit code.

    Attributes:
        expected: Restarts and sessions that the faults so far account for.
    """

    def __init__(self, scene: Scene, injections: Sequence[Injection], report: Callable[[str], None]) -> None:
        """Observe the run of a scene.

        Args:
            scene: The run and its storage.
            injections: The faults of this run; the list grows while it is watched.
            report: Receives progress, a line at a time.
        """
        self._scene, self._injections, self._report = scene, injections, report
        self.expected = Expected()

    def noticed(self, wanted: int) -> bool:
        """Wait until the journal has this many restarts in all.

        Returns:
            False if the run continues without them.
        """
        run = self._scene.run
        if run.wait(lambda: run_progress.num_restarts(run.entries) >= wanted or None, RECOVERY_LIMIT_S):
            return True
        code = run.process.poll()
        if code == ExitCode.DONE:
            # The fault hit a process whose work was committed already: its death then costs no restart.
            self.expected.min_restarts -= wanted - run_progress.num_restarts(run.entries)
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
        in_journal = run_progress.has_session(run.entries, run.process.pid)
        self.expected.sessions += in_journal or moment not in (Moment.START_UP, Moment.RESTORE)
        run.start()
        self._report(f"exit code {code}, started again")

    def recovered(self, injection: Injection, attempt: int | None, events: int) -> None:
        """Wait for a step after the fault.

        Args:
            injection: Receives the violation if none comes.
            attempt: The attempt that should continue; None for a new one.
            events: Number of events in the journal when the fault was injected.

        Raises:
            RunOver: The run does not continue.
        """
        run = self._scene.run
        if run.wait(lambda: run_progress.has_progressed(run.entries, events, attempt) or None, RECOVERY_LIMIT_S):
            return
        code = run.process.poll()
        if code == ExitCode.DONE or self._stopped_by_full_disk(code):
            return
        how = f"the runner exited with {code}" if code is not None else f"no step within {RECOVERY_LIMIT_S:.0f} s"
        injection.violations.append(f"no recovery: {how}: {run.tail(800)}")
        raise RunOver

    def finish(self, pace: JobPace) -> tuple[bool, list[str]]:
        """Let the run end without further faults.

        Args:
            pace: Number and duration of the job's steps.

        Returns:
            Whether it finished with its last checkpoint, and the violations found.
        """
        run, found = self._scene.run, []
        limit_s = RECOVERY_LIMIT_S + 4 * pace.steps * pace.step_s
        run.wait(lambda: None, limit_s)
        code = run.process.poll()
        if self._stopped_by_full_disk(code):
            # Its last save met the full disk: a user makes room and starts the run again.
            self.expected.sessions += 1
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
