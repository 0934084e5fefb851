"""One training under faults, from its start to its end."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.errors import CheckpointError
from runner.chaos import invariants
from runner.chaos.clock import Clock
from runner.chaos.faulty_proxy import BadLine, endpoint_of_environment
from runner.chaos.memory_group import MemoryGroup
from runner.chaos.result import HALVED_TOLERANCE, Strike
from runner.chaos.run_under_test import SETTLE_S
from runner.chaos.scene import Effect, FailpointFile, Moment, NotNow, Scene
from runner.errors import ExitCode
from runner.journal.summary import summarise
from runner.recovery.kinds import FailureKind

if TYPE_CHECKING:
    from runner.chaos.campaign import Campaign


# Whoever shows no new step this long after a fault hangs.
RECOVERY_LIMIT_S = 120.0
END_LIMIT_S = 90.0
_HALVED_EVERY = 4
_PROGRESS = ("log", "snapshot", "committed")


class _Over(Exception):
    """The run has finished, or cannot go on."""


class Round:
    """One run under faults."""

    def __init__(self, campaign: Campaign, number: int, folder: Path, num_faults: int, seconds: float | None) -> None:
        self._campaign, self._number, self._folder = campaign, number, folder
        self._num_faults, self._seconds = num_faults, seconds
        folder.mkdir(parents=True)
        self._failpoints = FailpointFile(folder / "failpoints")
        self._lives, self._least, self._most = 1, 0, 0
        self._shared_memory: set[Path] = set()
        # As `nothing_acknowledged_is_lost` wants them.
        self._damaged: list[tuple[int, int]] = []
        self._violations: list[str] = []

    def run(self) -> bool:
        """Whether all was well."""
        upstream = endpoint_of_environment()
        with contextlib.ExitStack() as stack:
            environment = self._failpoints.environment
            if upstream is not None and "://" in self._campaign.places.location(self._folder):
                line = stack.enter_context(BadLine(upstream))
                environment |= {"AWS_ENDPOINT_URL": line.endpoint, "AWS_ENDPOINT_URL_S3": line.endpoint}
            else:
                line = None
            clock, memory = self._clock(), self._memory(stack)
            if isinstance(clock, Clock):
                environment |= clock.environment
            tiers = self._campaign.places.tiers(self._folder)
            on_start = memory.enter if isinstance(memory, MemoryGroup) else lambda pid: None
            self._subject = self._campaign.subject(self._folder, environment, on_start)
            self._scene = Scene(self._subject, tiers, self._campaign.random, self._failpoints, line, clock, memory)
            return self._run()

    def _clock(self) -> Clock | str:
        try:
            return Clock(self._folder / "clock")
        except OSError as error:
            return str(error)

    def _memory(self, stack: contextlib.ExitStack) -> MemoryGroup | str:
        try:
            group = MemoryGroup()
        except OSError as error:
            return str(error)
        stack.callback(group.close)
        return group

    def _run(self) -> bool:
        result, campaign = self._campaign.result, self._campaign
        result.runs += 1
        before = len(result.all_violations)
        with self._subject:
            try:
                while not campaign._enough(self._num_faults, self._seconds):
                    self._strike_once()
            except _Over:
                pass
            finished = self._finish()
        self._violations += invariants.nothing_acknowledged_is_lost(self._subject.events, self._damaged)
        self._violations += invariants.restarts_are_those_injected(
            self._subject.events, self._least, self._most, self._lives_to_tell()
        )
        self._violations += invariants.ledger_adds_up(self._subject.events)
        self._violations += invariants.nothing_is_left(self._scene.tiers, self._subject.temporary, self._shared_memory)
        result.lost_steps += summarise(self._subject.events).lost_steps
        result.violations += [f"run {self._number}: {text}" for text in self._violations]
        halved = self._is_halved()
        differences = campaign.compare(self._folder, halved=halved) if finished else ["the run did not finish"]
        if not differences:
            result.identical, result.close = result.identical + (not halved), result.close + halved
        result.differences += [f"run {self._number}: {text}" for text in differences]
        well = not differences and len(result.all_violations) == before
        same = "as if nothing had happened" + (
            f", but for half a micro-batch (losses within {HALVED_TOLERANCE:.0%})" if halved else ""
        )
        campaign.say(f"run {self._number}: {same if well else 'NOT WELL'}, {len(result.strikes)} faults so far")
        for text in [*result.all_violations[before:], *differences]:
            campaign.say(f"  {text}")
        return well

    # -- one fault -----------------------------------------------------------------------------------------------

    def _strike_once(self) -> None:
        campaign, scene, subject = self._campaign, self._scene, self._subject
        # Twice would be too much for a small one.
        may_halve = (self._number % _HALVED_EVERY == 0 or campaign.all_halve) and not self._is_halved()
        if campaign.all_halve and not may_halve:
            raise _Over
        fault, moment = campaign.draw(scene, may_halve=may_halve)
        self._wait_for(moment)
        step, attempt, events = self._step(), self._attempt(), len(subject.events)
        restarts = self._restarts()
        scene.damaged.clear()
        self._shared_memory |= subject.shared_memory()
        try:
            what = fault.strike(scene)
        except NotNow as reason:
            campaign.skip(fault, str(reason))
            return
        at = time.monotonic()
        strike = Strike(fault.name, moment.value, self._number, step, what)
        campaign.result.strikes.append(strike)
        campaign.say(f"run {self._number}, step {step}: {fault.name} ({moment.value}): {what}")
        subject.refresh()
        self._damaged += [(len(subject.events), step) for step in scene.damaged]
        match fault.effect:
            case Effect.ATTEMPT:
                # Between two attempts, or while helpers start, nobody may have noticed.
                certain = moment in (Moment.STEP, Moment.SAVE)
                self._least += fault.restarts if certain else 0
                self._most += fault.restarts
                if certain and not self._noticed(restarts + fault.restarts):
                    strike.violations.append(f"nobody noticed within {RECOVERY_LIMIT_S:.0f} s")
            case Effect.RUN:
                self._restart(strike, moment)
            case Effect.NOTHING:
                # But for the last save, which is waited for: an attempt whose last save fails is tried again.
                self._most += 1
        if self._recovered(strike, attempt if fault.effect is Effect.NOTHING else None, events):
            strike.recovered_s = round(time.monotonic() - at, 2) if fault.effect is not Effect.NOTHING else None
        strike.violations += invariants.newest_is_whole(scene.tiers, scene.damaged)
        if strike.violations:
            for text in strike.violations:
                campaign.say(f"  VIOLATION: {text}")

    def _wait_for(self, moment: Moment) -> None:
        """Until that moment, at a random distance from its beginning."""
        campaign, subject = self._campaign, self._subject
        match moment:
            case Moment.START_UP:
                delay_s = 4.0
            case Moment.RESTORE:
                delay_s = 1.5
            case Moment.STEP:
                subject.wait(lambda: self._step() > 0 or None, RECOVERY_LIMIT_S)
                left = max(campaign.result.steps - self._step(), 1) * campaign.step_s
                delay_s = min(2.0, left / 4)
            case Moment.SAVE:
                number = sum(event["to_be_committed"] for event in subject.all("snapshot"))
                subject.wait(
                    lambda: sum(event["to_be_committed"] for event in subject.all("snapshot")) > number or None,
                    RECOVERY_LIMIT_S,
                )
                delay_s = 0.2
        if moment in (Moment.START_UP, Moment.RESTORE) and self._step() > 0:
            # There is an attempt that runs: have it end.
            self._provoke(moment)
        time.sleep(campaign.random.uniform(0, delay_s))
        subject.refresh()
        if subject.process.poll() is not None:
            raise _Over

    def _provoke(self, moment: Moment) -> None:
        """Kill a rank, for the next attempt's start; counted, but no fault of its own."""
        subject, restarts, attempt = self._subject, self._restarts(), self._attempt()
        ranks = self._scene.ranks()
        if not ranks:
            return
        self._campaign.random.choice(ranks).kill()
        self._least, self._most = self._least + 1, self._most + 1
        self._noticed(restarts + 1)
        if moment is Moment.RESTORE:
            subject.wait(lambda: subject.all("rank_started", after=attempt) or None, RECOVERY_LIMIT_S)

    def _noticed(self, wanted: int) -> bool:
        """Wait for so many restarts in all; False: the run goes on without."""
        subject = self._subject
        if subject.wait(lambda: self._restarts() >= wanted or None, RECOVERY_LIMIT_S):
            return True
        code = subject.process.poll()
        if code == ExitCode.DONE:
            # What was struck had done its part: when all is committed, its end costs nothing.
            self._least -= wanted - self._restarts()
        return code is not None

    def _restart(self, strike: Strike, moment: Moment) -> None:
        """The runner ends; whoever has started it does so again."""
        subject, campaign = self._subject, self._campaign
        subject.wait(lambda: None, END_LIMIT_S)
        code = subject.process.poll()
        if code is None:
            strike.violations.append(f"the runner did not end within {END_LIMIT_S:.0f} s")
            raise _Over
        if code not in (ExitCode.PREEMPTED, ExitCode.DONE, -9):
            strike.violations.append(f"the runner ended with {code}: {subject.tail(500)}")
            raise _Over
        strike.violations += invariants.exit_code_is_the_journals(subject.events, subject.process.pid, code)
        # An agent whose supervisor was killed first commits what is whole.
        settle_s = END_LIMIT_S if code == -9 else SETTLE_S
        strike.violations += [f"left over: {left}" for left in subject.leftovers(settle_s)]
        if code == ExitCode.DONE:
            raise _Over
        if code == -9:
            # What a killed runner had no chance to remove: the next one's machine is another, or its /tmp is.
            for path in subject.temporary.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        strike.violations += invariants.newest_is_whole(self._scene.tiers, self._scene.damaged)
        # One that ended before it had anything to tell leaves no line.
        told = any(event["pid"] == subject.process.pid for event in subject.all("run_started"))
        self._lives += told or moment not in (Moment.START_UP, Moment.RESTORE)
        subject.start()
        campaign.say(f"run {self._number}: exit {code}, started again")

    def _recovered(self, strike: Strike, attempt: int | None, events: int) -> bool:
        """Wait for a step of the attempt (None: of a new one) after so many events."""
        subject = self._subject

        def progress() -> bool | None:
            for event in subject.events[events:]:
                if event["event"] in _PROGRESS and (attempt is None or event["attempt"] >= attempt):
                    newest = self._attempt()
                    if attempt is not None or (event["attempt"] == newest and self._began_after(events)):
                        return True
            return None

        if subject.wait(progress, RECOVERY_LIMIT_S):
            return True
        code = subject.process.poll()
        if code == ExitCode.DONE or self._wants_room(code):
            return True
        how = f"the runner ended with {code}" if code is not None else f"no step within {RECOVERY_LIMIT_S:.0f} s"
        strike.violations.append(f"did not come back: {how}: {subject.tail(800)}")
        raise _Over

    def _began_after(self, events: int) -> bool:
        return any(event["event"] == "training_started" for event in self._subject.events[events:])

    def _wants_room(self, code: int | None) -> bool:
        """It has ended for a disk that was full for a moment."""
        struck = (strike.fault for strike in self._campaign.result.strikes if strike.run == self._number)
        return code == ExitCode.STORAGE_FAILED and any(fault.startswith("disk full") for fault in struck)

    def _finish(self) -> bool:
        """Let it end by itself; whether it ended well."""
        subject, campaign = self._subject, self._campaign
        limit = RECOVERY_LIMIT_S + 4 * campaign.result.steps * campaign.step_s
        subject.wait(lambda: None, limit)
        code = subject.process.poll()
        if self._wants_room(code):
            # Its last save met the full disk: a user makes room and restarts the run.
            self._lives += 1
            subject.start()
            campaign.say(f"run {self._number}: exit {code}, started again")
            subject.wait(lambda: None, limit)
            code = subject.process.poll()
        if code != ExitCode.DONE:
            ended = f"ended with {code}" if code is not None else f"did not end within {limit:.0f} s"
            self._violations.append(f"without further faults it {ended}: {subject.tail(800)}")
            return False
        self._violations += invariants.exit_code_is_the_journals(subject.events, subject.process.pid, code)
        self._violations += [f"left over: {left}" for left in subject.leftovers()]
        try:
            steps = self._scene.tiers.catalog.committed_steps()
        except (CheckpointError, OSError) as error:
            self._violations.append(f"checkpoints cannot be read: {error}")
            return False
        if not steps or steps[-1] != campaign.result.steps:
            self._violations.append(f"it has finished, but its newest checkpoint is {steps[-1:]}")
            return False
        self._violations += invariants.newest_is_whole(self._scene.tiers, set())
        return True

    # -- what the journal says -----------------------------------------------------------------------------------

    def _step(self) -> int:
        return max((event["step"] for event in self._subject.events if event["event"] in _PROGRESS), default=0)

    def _attempt(self) -> int:
        return max((event["attempt"] for event in self._subject.events), default=0)

    def _is_halved(self) -> bool:
        ended = self._subject.all("attempt_ended")
        return any(event["kind"] == FailureKind.OUT_OF_MEMORY.value for event in ended)

    def _restarts(self) -> int:
        return len(self._subject.all("backoff"))

    def _lives_to_tell(self) -> int:
        """Lives of the runner that have something to put into the journal: one that finds its run finished has not."""
        ended, started = self._subject.all("run_ended"), self._subject.all("run_started")
        was_finished = bool(ended) and ended[-1]["state"] == "finished"
        return self._lives - (was_finished and started[-1]["pid"] != self._subject.process.pid)
