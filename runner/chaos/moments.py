"""Waiting for the moment at which a fault is injected."""

from __future__ import annotations

import time

from runner.chaos import run_progress
from runner.chaos.recovery import RECOVERY_LIMIT_S, RecoveryWatch, RunOver
from runner.chaos.scene import JobPace, Moment, Scene
from runner.journal.events import RankStarted


class MomentWaiter:
    """Waits for a moment, and makes an attempt end where the moment belongs to the next attempt's start."""

    def __init__(self, scene: Scene, recovery: RecoveryWatch, pace: JobPace) -> None:
        """Keep what is waited on.

        Args:
            scene: The run and its random source.
            recovery: Notices the restart that a provoked failure causes.
            pace: Number and duration of the job's steps.
        """
        self._scene, self._recovery, self._pace = scene, recovery, pace

    def wait_for(self, moment: Moment) -> None:
        """Return at a random time shortly after `moment` begins.

        Raises:
            RunOver: The run ended before.
        """
        run = self._scene.run
        match moment:
            case Moment.START_UP:
                delay_s = 4.0
            case Moment.RESTORE:
                delay_s = 1.5
            case Moment.STEP:
                run.wait(lambda: run_progress.latest_step(run.entries) > 0 or None, RECOVERY_LIMIT_S)
                left = max(self._pace.steps - run_progress.latest_step(run.entries), 1) * self._pace.step_s
                delay_s = min(2.0, left / 4)
            case Moment.SAVE:
                number = run_progress.num_saves_begun(run.entries)
                run.wait(lambda: run_progress.num_saves_begun(run.entries) > number or None, RECOVERY_LIMIT_S)
                delay_s = 0.2
        if moment in (Moment.START_UP, Moment.RESTORE) and run_progress.latest_step(run.entries) > 0:
            self._provoke(moment)
        time.sleep(self._scene.random.uniform(0, delay_s))
        run.refresh()
        if run.process.poll() is not None:
            raise RunOver

    def _provoke(self, moment: Moment) -> None:
        """Kill a rank so that another attempt starts; the restart is expected, but it is no fault of its own."""
        run = self._scene.run
        attempt = run_progress.latest_attempt(run.entries)
        ranks = self._scene.ranks()
        if not ranks:
            return
        restarts = run_progress.num_restarts(run.entries)
        self._scene.random.choice(ranks).kill()
        self._recovery.expected.min_restarts += 1
        self._recovery.expected.max_restarts += 1
        self._recovery.noticed(restarts + 1)
        if moment is Moment.RESTORE:
            run.wait(lambda: run.all(RankStarted, after=attempt) or None, RECOVERY_LIMIT_S)
