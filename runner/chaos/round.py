"""One run under faults, from its start to its verdict."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from checkpointing.commit.tiers import Tiers
from runner.chaos import invariants, recovery
from runner.chaos.recovery import RECOVERY_LIMIT_S, RecoveryWatch, RunOver
from runner.chaos.scene import CampaignFailed, Effect, Fault, JobPace, Moment, NotApplicable, Scene
from runner.chaos.verdict import Injection, Result
from runner.journal.events import RankStarted
from runner.journal.summary import summarise

_HALVED_EVERY = 4


def draw_fault(
    faults: Sequence[Fault], tiers: Tiers, result: Result, random: Random, *, may_halve: bool
) -> tuple[Fault, Moment]:
    """Return the next fault and its moment: at random, but by the result so far all kinds equally often.

    Raises:
        CampaignFailed: None of the faults is applicable to the storage of the run.
    """
    fitting = [fault for fault in faults if fault.fits(tiers) and (may_halve or not fault.halves)]
    if not fitting:
        raise CampaignFailed(
            "none of the chosen faults applies to the storage of this job's checkpoints; choose others (--list)"
        )
    injected = [injection.fault for injection in result.injections]
    tries = {fault.name: injected.count(fault.name) + result.num_skipped(fault.name) for fault in fitting}
    least = min(tries.values())
    fault = random.choice([fault for fault in fitting if tries[fault.name] == least])
    return fault, random.choice(fault.moments)


class Round:
    """Injects faults into one run until it is over or enough were injected, and checks what it leaves."""

    def __init__(
        self,
        number: int,
        scene: Scene,
        faults: Sequence[Fault],
        pace: JobPace,
        result: Result,
        report: Callable[[str], None],
    ) -> None:
        """Prepare run `number`, from 1; `result` receives every injection as soon as it is done."""
        self._number, self._scene, self._faults = number, scene, faults
        self._result, self._pace, self._report = result, pace, report
        self._injections: list[Injection] = []
        self._recovery = RecoveryWatch(scene, self._injections, lambda text: report(f"run {number}: {text}"))
        self._shared_memory: set[Path] = set()
        # (number of entries at that time, step) of each damaged checkpoint.
        self._damaged: list[tuple[int, int]] = []
        # At the end of the run: they belong to no single fault.
        self.violations: list[str] = []

    def run(self, is_enough: Callable[[], bool]) -> bool:
        """Run the job until no further fault is wanted, then let it end; return whether it has its last checkpoint."""
        run, expected = self._scene.run, self._recovery
        with run:
            # The end of the run is a result like any other: it is checked below.
            with contextlib.suppress(RunOver):
                while not is_enough():
                    self._inject_next()
            finished, self.violations = expected.finish(self._pace)
        entries = run.entries
        self.violations += invariants.nothing_acknowledged_is_lost(entries, self._damaged)
        sessions = recovery.num_sessions_in_journal(entries, expected.sessions, run.process.pid)
        self.violations += invariants.restarts_match(entries, expected.min_restarts, expected.max_restarts, sessions)
        self.violations += invariants.ledger_adds_up(entries)
        self.violations += invariants.nothing_is_left(self._scene.tiers, run.temporary, self._shared_memory)
        self._result.lost_steps += summarise(entries).lost_steps
        return finished

    @property
    def is_halved(self) -> bool:
        """Whether a fault made the run halve its micro-batch."""
        return recovery.is_halved(self._scene.run.entries)

    def _inject_next(self) -> None:
        scene, run = self._scene, self._scene.run
        all_halve = all(fault.halves for fault in self._faults)
        # Halving twice would leave too little of a small micro-batch.
        may_halve = (self._number % _HALVED_EVERY == 0 or all_halve) and not self.is_halved
        if all_halve and not may_halve:
            raise RunOver
        fault, moment = draw_fault(self._faults, scene.tiers, self._result, scene.random, may_halve=may_halve)
        self._wait_for(moment)
        step, attempt = recovery.latest_step(run.entries), recovery.latest_attempt(run.entries)
        num_entries, restarts = len(run.entries), recovery.num_restarts(run.entries)
        scene.damaged.clear()
        self._shared_memory |= run.shared_memory()
        try:
            what = fault.inject(scene)
        except NotApplicable as reason:
            self._result.skip(fault.name, str(reason))
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
        expected = self._recovery
        match fault.effect:
            case Effect.ATTEMPT:
                # Between two attempts, or while helpers start, the fault may hit a process that is not needed.
                is_certain = moment in (Moment.STEP, Moment.SAVE)
                expected.min_restarts += fault.restarts if is_certain else 0
                expected.max_restarts += fault.restarts
                if is_certain and not expected.noticed(restarts + fault.restarts):
                    injection.violations.append(f"the runner did not notice within {RECOVERY_LIMIT_S:.0f} s")
            case Effect.RUN:
                expected.restart(injection, moment)
            case Effect.NOTHING:
                # An attempt whose last save fails is retried, because the run waits for that save.
                expected.max_restarts += 1

    def _wait_for(self, moment: Moment) -> None:
        """Return at a random time shortly after `moment` begins; raise RunOver if the run ends before."""
        run = self._scene.run
        match moment:
            case Moment.START_UP:
                delay_s = 4.0
            case Moment.RESTORE:
                delay_s = 1.5
            case Moment.STEP:
                run.wait(lambda: recovery.latest_step(run.entries) > 0 or None, RECOVERY_LIMIT_S)
                left = max(self._pace.steps - recovery.latest_step(run.entries), 1) * self._pace.step_s
                delay_s = min(2.0, left / 4)
            case Moment.SAVE:
                number = recovery.num_saves_begun(run.entries)
                run.wait(lambda: recovery.num_saves_begun(run.entries) > number or None, RECOVERY_LIMIT_S)
                delay_s = 0.2
        if moment in (Moment.START_UP, Moment.RESTORE) and recovery.latest_step(run.entries) > 0:
            self._provoke(moment)
        time.sleep(self._scene.random.uniform(0, delay_s))
        run.refresh()
        if run.process.poll() is not None:
            raise RunOver

    def _provoke(self, moment: Moment) -> None:
        """Kill a rank so that another attempt starts; the restart is expected, but it is no fault of its own."""
        run = self._scene.run
        attempt = recovery.latest_attempt(run.entries)
        ranks = self._scene.ranks()
        if not ranks:
            return
        restarts = recovery.num_restarts(run.entries)
        self._scene.random.choice(ranks).kill()
        self._recovery.min_restarts += 1
        self._recovery.max_restarts += 1
        self._recovery.noticed(restarts + 1)
        if moment is Moment.RESTORE:
            run.wait(lambda: run.all(RankStarted, after=attempt) or None, RECOVERY_LIMIT_S)
