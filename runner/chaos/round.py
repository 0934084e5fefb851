"""One run under faults, from its start to its verdict."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from runner.chaos import invariants, run_progress
from runner.chaos.clock_jumps import Clock
from runner.chaos.draw import FaultDraw
from runner.chaos.faulty_proxy import FaultyProxy, endpoint_of_environment
from runner.chaos.locations import Locations
from runner.chaos.memory_group import MemoryGroup
from runner.chaos.recovery import RECOVERY_LIMIT_S, RecoveryWatch, RunOver
from runner.chaos.result import Injection, Result
from runner.chaos.run_under_test import RunUnderTest
from runner.chaos.scene import Effect, FailpointFile, Fault, JobPace, Moment, NotApplicable, Scene
from runner.journal.events import RankStarted
from runner.journal.summary import summarise

_HALVED_EVERY = 4

StartRun = Callable[[Path, dict[str, str], Callable[[int], None]], RunUnderTest]
"""Makes the run of a folder, with additional environment variables and a callback for the runner's process id."""


@contextlib.contextmanager
def prepare_scene(folder: Path, locations: Locations, random: Random, make_run: StartRun) -> Iterator[Scene]:
    """Set up everything that faults need around a run, which is not started yet.

    Args:
        folder: The run's folder, which does not exist yet.
        locations: Where its checkpoints are kept.
        random: Source of all choices.
        make_run: Makes the run.
    """
    folder.mkdir(parents=True)
    failpoints = FailpointFile(folder / "failpoints")
    environment = failpoints.environment
    upstream = endpoint_of_environment()
    with contextlib.ExitStack() as stack:
        proxy = None
        if upstream is not None and "://" in locations.location(folder):
            proxy = stack.enter_context(FaultyProxy(upstream))
            environment |= {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        clock, memory = _clock(folder), _memory_group(stack)
        if isinstance(clock, Clock):
            environment |= clock.environment
        on_start = memory.enter if isinstance(memory, MemoryGroup) else lambda pid: None
        tiers = locations.tiers(folder)
        yield Scene(make_run(folder, environment, on_start), tiers, random, failpoints, proxy, clock, memory)


def _clock(folder: Path) -> Clock | str:
    try:
        return Clock(folder / "clock")
    except OSError as error:
        return str(error)


def _memory_group(stack: contextlib.ExitStack) -> MemoryGroup | str:
    try:
        group = MemoryGroup()
    except OSError as error:
        return str(error)
    stack.callback(group.close)
    return group


class Round:
    """Injects faults into one run until it is over or enough were injected, and checks what it leaves.

    Attributes:
        differences: What differs from the fault-free run, once `run` has returned.
        violations: Violations at the end of the run, which belong to no single fault.
    """

    def __init__(
        self,
        number: int,
        scene: Scene,
        draw: FaultDraw,
        pace: JobPace,
        result: Result,
        report: Callable[[str], None],
    ) -> None:
        """Prepare the run of a scene.

        Args:
            number: Number of the run, from 1.
            scene: The run and what may be touched.
            draw: Draws the faults.
            pace: Number and duration of the job's steps.
            result: Receives every injection as soon as it is done.
            report: Receives progress, a line at a time.
        """
        self._number, self._scene, self._draw = number, scene, draw
        self._result, self._pace, self._report = result, pace, report
        self._injections: list[Injection] = []
        self._recovery = RecoveryWatch(scene, self._injections, lambda text: report(f"run {number}: {text}"))
        self._moments = MomentWaiter(scene, self._recovery, pace)
        self._shared_memory: set[Path] = set()
        # (number of entries at that time, step) of each damaged checkpoint.
        self._damaged: list[tuple[int, int]] = []
        self.violations: list[str] = []

    def run(self, is_enough: Callable[[], bool]) -> bool:
        """Run the job under faults, then let it end.

        Args:
            is_enough: Whether no further fault is wanted.

        Returns:
            Whether the run finished with its last checkpoint.
        """
        run, scene, expected = self._scene.run, self._scene, self._recovery.expected
        with run:
            # The end of the run is a result like any other: it is checked below.
            with contextlib.suppress(RunOver):
                while not is_enough():
                    self._inject_next()
            finished, self.violations = self._recovery.finish(self._pace)
        entries = run.entries
        self.violations += invariants.nothing_acknowledged_is_lost(entries, self._damaged)
        sessions = run_progress.num_sessions_in_journal(entries, expected.sessions, run.process.pid)
        self.violations += invariants.restarts_match(entries, expected.min_restarts, expected.max_restarts, sessions)
        self.violations += invariants.ledger_adds_up(entries)
        self.violations += invariants.nothing_is_left(scene.tiers, run.temporary, self._shared_memory)
        self._result.lost_steps += summarise(entries).lost_steps
        return finished

    @property
    def is_halved(self) -> bool:
        """Whether a fault made the run halve its micro-batch."""
        return run_progress.is_halved(self._scene.run.entries)

    def _inject_next(self) -> None:
        # Halving twice would leave too little of a small micro-batch.
        may_halve = (self._number % _HALVED_EVERY == 0 or self._draw.all_halve) and not self.is_halved
        if self._draw.all_halve and not may_halve:
            raise RunOver
        fault, moment = self._draw.next(self._scene.tiers, may_halve=may_halve)
        self._moments.wait_for(moment)
        scene, run = self._scene, self._scene.run
        step, attempt, num_entries = (
            run_progress.latest_step(run.entries),
            run_progress.latest_attempt(run.entries),
            len(run.entries),
        )
        restarts = run_progress.num_restarts(run.entries)
        scene.damaged.clear()
        self._shared_memory |= run.shared_memory()
        try:
            what = fault.inject(scene)
        except NotApplicable as reason:
            self._draw.skip(fault, str(reason))
            return
        at = time.monotonic()
        injection = Injection(fault.name, moment.value, self._number, step, what)
        self._injections.append(injection)
        self._result.injections.append(injection)
        self._report(f"run {self._number}, step {step}: {fault.name} ({moment.value}): {what}")
        run.refresh()
        self._damaged += [(len(run.entries), step) for step in scene.damaged]
        ends_something = fault.effect is not Effect.NOTHING
        self._expect(fault, moment, injection, restarts)
        self._recovery.recovered(injection, None if ends_something else attempt, num_entries)
        injection.recovered_s = round(time.monotonic() - at, 2) if ends_something else None
        injection.violations += invariants.newest_is_intact(scene.tiers, scene.damaged)
        for text in injection.violations:
            self._report(f"  VIOLATION: {text}")

    def _expect(self, fault: Fault, moment: Moment, injection: Injection, restarts: int) -> None:
        """Account for the restarts of a fault, and wait for the runner's reaction."""
        expected = self._recovery.expected
        match fault.effect:
            case Effect.ATTEMPT:
                # Between two attempts, or while helpers start, the fault may hit a process that is not needed.
                is_certain = moment in (Moment.STEP, Moment.SAVE)
                expected.min_restarts += fault.restarts if is_certain else 0
                expected.max_restarts += fault.restarts
                if is_certain and not self._recovery.noticed(restarts + fault.restarts):
                    injection.violations.append(f"the runner did not notice within {RECOVERY_LIMIT_S:.0f} s")
            case Effect.RUN:
                self._recovery.restart(injection, moment)
            case Effect.NOTHING:
                # An attempt whose last save fails is retried, because the run waits for that save.
                expected.max_restarts += 1


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
