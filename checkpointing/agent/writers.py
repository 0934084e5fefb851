"""The storage workers of a run: one for each of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable

from checkpointing.agent.arenas import Arena
from checkpointing.agent.reporting import Report, Result, stamped
from checkpointing.agent.writer import Writer
from checkpointing.commit.tiers import FIRST_STAGE, STAGE_NAME, Tiers, TrainingStage

MakeWorker = Callable[[Tiers, Report, bool], Writer]


class Writers:
    """Keeps the workers of stages that are over until the agent ends: their uploads may not be.

    Attributes:
        stage: The stage that trains now.
    """

    def __init__(self, tiers: Tiers, report: Report, make: MakeWorker, *, commits: bool) -> None:
        """Create the first stage's worker.

        Args:
            tiers: Where the run keeps its checkpoints.
            report: Takes the workers' results; those of later stages are stamped.
            make: Creates a worker, which commits or does not.
            commits: Whether this node is the one that commits.
        """
        self._tiers, self._report, self._make, self._commits = tiers, report, make, commits
        self._workers = {FIRST_STAGE.name: make(tiers, report, commits)}
        self.stage = FIRST_STAGE
        self._is_hurried = False

    @property
    def commits(self) -> bool:
        """Whether this node is the one that commits; the others write their parts of what it commits."""
        return self._commits

    @commits.setter
    def commits(self, commits: bool) -> None:
        self._commits = commits
        for worker in self._workers.values():
            worker.fencer.commits = commits

    @property
    def current(self) -> Writer:
        """Of the stage that trains now."""
        return self._workers[self.stage.name]

    @property
    def of_run(self) -> Writer:
        """Of the run's own location, where other machines look for what concerns the run as a whole."""
        return self._workers[FIRST_STAGE.name]

    def of(self, stage: str) -> Writer:
        """Of a stage that has been entered."""
        return self._workers[stage]

    @property
    def are_uploading(self) -> bool:
        """Whether anything is on its way to the durable tier."""
        return any(worker.is_uploading for worker in self._workers.values())

    def start(self) -> None:
        """Start the first stage's threads."""
        self.of_run.start()

    def restart(self) -> None:
        """Make the first stage the one that trains now: an attempt begins."""
        self.stage = FIRST_STAGE

    @staticmethod
    def check(stage: TrainingStage) -> None:
        """Check that a later stage can be entered.

        Raises:
            ValueError: Its name cannot be one.
        """
        if not STAGE_NAME.fullmatch(stage.name):
            raise ValueError(f"{stage.name!r} is not the name of a stage")

    def enter(self, stage: TrainingStage) -> None:
        """Make this the stage that trains now, and start its threads when it is entered for the first time."""
        self.stage = stage
        if stage.name not in self._workers:
            report = functools.partial(self._report_of, stage)
            worker = self._make(self._tiers.inside(stage), report, self._commits)
            worker.publisher.is_hurried = self._is_hurried
            self._workers[stage.name] = worker
            worker.start()

    def hurry(self, is_hurried: bool) -> None:
        """Have nothing done that can wait, or have it done again."""
        self._is_hurried = is_hurried
        for worker in self._workers.values():
            worker.publisher.is_hurried = is_hurried

    def upload_due(self) -> None:
        """Upload what is due, of all stages."""
        for worker in self._workers.values():
            worker.upload_due()

    def close(self) -> None:
        """End all threads, after all that was handed over."""
        for worker in self._workers.values():
            worker.close()

    def _report_of(self, stage: TrainingStage, result: Result, arena: Arena | None) -> None:
        self._report(stamped(result, stage), arena)
