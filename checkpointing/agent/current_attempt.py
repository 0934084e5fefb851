"""The attempt that runs now: its begin, the stages it passes through, and its end."""

from __future__ import annotations

from collections.abc import Callable

from checkpointing.agent.events import Event, StageEntered
from checkpointing.agent.resumption import Resumption
from checkpointing.agent.scheduler import Scheduler
from checkpointing.agent.writers import Writers
from checkpointing.commit.tiers import TrainingStage
from checkpointing.host.heartbeat import CommitReport, ControlPage


class CurrentAttempt:
    """Used by the agent's main thread alone.

    Attributes:
        number: Its number; -1 before the first.
        control: Heartbeats, the stop flag and the last commit, shared with ranks and supervisor.
    """

    def __init__(
        self,
        workers: Writers,
        scheduler: Scheduler,
        resumption: Resumption,
        control: ControlPage,
        publish: Callable[[Event], None],
    ) -> None:
        """Create it, before the first attempt.

        Args:
            workers: Begin attempts at storage.
            scheduler: Holds the snapshots.
            resumption: Offers them.
            control: The shared page.
            publish: Takes events for monitors.
        """
        self._workers, self._scheduler, self._resumption = workers, scheduler, resumption
        self._publish = publish
        self.control = control
        self.number = -1

    def begin(self, number: int, *, fetch: bool) -> None:
        """Begin an attempt, unless it or a newer one runs.

        Args:
            number: Its number.
            fetch: Whether it resumes from the newest checkpoint, which may be read before ranks ask for it.
        """
        if number <= self.number:
            return
        self._scheduler.drop_unfinished()
        self.number = number
        self._workers.restart()
        self._begin_stage(fetch=fetch)
        self.control.stop_requested, self.control.saves_requested = False, 0
        self.control.clear()

    def enter(self, stage: TrainingStage, *, fetch: bool) -> None:
        """Begin another training of this run: its checkpoints are kept apart from those before it.

        Nothing of the stage before is unfinished: its ranks have waited for their last commit.

        Args:
            stage: The stage; nothing happens if it trains already.
            fetch: As for `begin`.

        Raises:
            ValueError: Its name cannot be one.
        """
        if stage.name == self._workers.stage.name:
            return
        self._workers.check(stage)
        self._scheduler.drop_unfinished()
        self._workers.enter(stage)
        self.control.last_commit = CommitReport()
        self._begin_stage(fetch=fetch)
        self._publish(StageEntered(stage=stage.name, number=stage.number, steps_before=stage.steps_before))
        self._workers.of_run.keep(f"{stage.name}.json", stage.to_json())

    def end(self) -> None:
        """Drop what ranks have left unfinished, and commit the newest snapshot."""
        self._scheduler.drop_unfinished()
        self._scheduler.commit_newest()

    def _begin_stage(self, *, fetch: bool) -> None:
        # What is still held of older attempts may yet be committed.
        held = self._scheduler.begin_stage()
        self._resumption.begin(self._workers.current.begin_attempt(self.number, held), fetch=fetch)
