"""The runs: one in peace, then as many under faults as it takes to strike all of them; all must end in the same bits.

A fault strikes at a random moment: while an attempt starts, while it restores, in mid-step, around a save. What comes
of it is waited for, as a user would: by the journal and by the exit code. A runner that has ended is started again, as
Kubernetes or Slurm would.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.errors import CheckpointError
from runner.chaos import invariants
from runner.chaos.clock import Clock
from runner.chaos.faults import FAULTS, Effect, FailpointFile, Fault, Moment, NotNow, Scene
from runner.chaos.faulty_proxy import BadLine, endpoint_of_environment
from runner.chaos.locations import Places
from runner.chaos.memory_group import MemoryGroup
from runner.chaos.run_under_test import SETTLE_S, Subject, runner_command
from runner.errors import ExitCode, RunnerError
from runner.journal.journal import Event
from runner.journal.summary import summarise
from runner.recovery.classify import FailureKind
from runner.system import processes

# Whoever shows no new step this long after a fault hangs.
RECOVERY_LIMIT_S = 120.0
END_LIMIT_S = 90.0
# Budgets and waits are for strangers; here faults are expected.
SETTINGS = ("restart.max_restarts=1000000", "restart.backoff_max_s=0.2", "restart.backoff_jitter_s=0.05")
# Where the micro-batch was halved, sums are made in another order, and dropout falls otherwise: losses may differ by
# this share. The faults that do that strike in every so many-th run only, so that others are compared bit for bit.
HALVED_TOLERANCE = 0.02
_HALVED_EVERY = 4
# For a job that does not end in the same bits when nobody disturbs it, either (kernels that add in any order).
UNSTEADY_TOLERANCE = 1e-3
_PROGRESS = ("log", "snapshot", "committed")


class CampaignFailed(RunnerError):
    """The job does not even end well in peace."""

    exit_code = ExitCode.USAGE


@dataclass
class Strike:
    """One fault, and what came of it."""

    fault: str
    moment: str
    run: int
    step: int
    what: str
    recovered_s: float | None = None
    violations: list[str] = field(default_factory=list)


@dataclass
class Result:
    """All that a campaign has found.

    Attributes:
        skipped: by fault, how often it could not strike, and why the last time.
        identical: runs under faults that ended in the same bits as the one in peace, of `runs`.
        close: others, whose micro-batch was halved, and whose losses were within HALVED_TOLERANCE of its.
        unsteady: the job ends in other bits each time, also in peace: compared within UNSTEADY_TOLERANCE.
        differences: what differed.
        lost_steps: computed again.
    """

    strikes: list[Strike] = field(default_factory=list)
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    runs: int = 0
    identical: int = 0
    close: int = 0
    unsteady: bool = False
    differences: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    lost_steps: int = 0
    steps: int = 0
    total_s: float = 0.0

    @property
    def all_violations(self) -> list[str]:
        struck = [
            f"run {strike.run}, {strike.fault} at step {strike.step}: {text}"
            for strike in self.strikes
            for text in strike.violations
        ]
        return struck + self.violations

    @property
    def well(self) -> bool:
        return not self.all_violations and self.identical + self.close == self.runs


class Campaign:
    """A job, its reference, and the faults that it is to survive."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        *,
        places: Places,
        seed: int,
        faults: Sequence[Fault] = FAULTS,
        tolerance: float | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        """`options` are `runner start`'s. With a tolerance, bits may differ by that share of a tensor's norm."""
        self._folder, self.places = folder, places
        self._options = [*options, *(part for setting in SETTINGS for part in ("--set", setting))]
        self.random = random.Random(seed)
        self._faults, self._tolerance, self._tell = list(faults), tolerance, tell
        self._began = time.monotonic()
        self.result = Result()

    def run(self, num_faults: int, *, seconds: float | None = None, keep: bool = False) -> Result:
        """Strike so many faults, and for so many seconds where that is given.

        Args:
            keep: leave the folders of runs that ended well, too.

        Raises:
            CampaignFailed: the job does not end well in peace.
        """
        processes.become_subreaper()
        self._reference()
        stalled = 0
        while not self._enough(num_faults, seconds) and stalled < 3:
            before = len(self.result.strikes)
            number = self.result.runs + 1
            folder = self._folder / f"run-{number}"
            well = _Round(self, number, folder, num_faults, seconds).run()
            if well and not keep:
                self.places.remove(folder)
            stalled = stalled + 1 if len(self.result.strikes) == before else 0
        self.result.total_s = time.monotonic() - self._began
        return self.result

    def _enough(self, num_faults: int, seconds: float | None) -> bool:
        done = len(self.result.strikes) >= num_faults
        return done and (seconds is None or time.monotonic() - self._began >= seconds)

    def say(self, text: str) -> None:
        self._tell(f"[{time.monotonic() - self._began:6.0f} s] {text}")

    def subject(
        self, folder: Path, environment: dict[str, str], on_start: Callable[[int], None] = lambda pid: None
    ) -> Subject:
        folder.mkdir(parents=True, exist_ok=True)
        command = runner_command(folder, *self._options, *self.places.settings(folder))
        return Subject(command, folder, environment, on_start)

    def _reference(self) -> None:
        self.say("the run in peace")
        self._reference_folder = self._folder / "reference"
        run = summarise(self._in_peace(self._reference_folder))
        if run.total_steps is None or not run.committed:
            raise CampaignFailed(f"the job has committed no checkpoint; see {self._reference_folder / 'output.log'}")
        self.result.steps = run.total_steps
        attempt = run.attempts[-1]
        trained = (attempt.last_step_at or 0.0) - (attempt.training_began or 0.0)
        self.step_s = max(trained / max(run.total_steps, 1), 1e-3)
        self.say(f"{run.total_steps} steps of {self.step_s:.3f} s")

    def _in_peace(self, folder: Path) -> list[Event]:
        with self.subject(folder, {}) as subject:
            code = subject.process.wait()
            subject.refresh()
            if code != 0:
                raise CampaignFailed(
                    f"the job ends with {code} without any fault; see {subject.folder / 'output.log'}:\n"
                    f"{subject.tail(2000)}"
                )
        return subject.events

    @functools.cached_property
    def _steady(self) -> bool:
        """Whether the job ends in the same bits when it is run in peace again."""
        self.say("bits differ: the run in peace once more, to see whether it is the faults")
        folder = self._folder / "reference-again"
        self._in_peace(folder)
        differences = self._differences(folder)
        if differences:
            self.result.unsteady = True
            self.say(
                f"it is not: the job itself ends in other bits each time ({differences[0]}). Compared within "
                f"{UNSTEADY_TOLERANCE:g} of each tensor's norm from now on; --deterministic may mend it"
            )
        return not differences

    def compare(self, folder: Path, *, halved: bool) -> list[str]:
        """What differs between the last checkpoints of a run and of the one in peace."""
        tolerance = UNSTEADY_TOLERANCE if self.result.unsteady and self._tolerance is None else self._tolerance
        if halved:
            return self._differences(folder, losses=HALVED_TOLERANCE)
        differences = self._differences(folder, tolerance=tolerance)
        if differences and tolerance is None and not self._steady:
            return self._differences(folder, tolerance=UNSTEADY_TOLERANCE)
        return differences

    def _differences(self, folder: Path, **options: float | None) -> list[str]:
        folders = (self._reference_folder, folder)
        places = [json.dumps([self.places.location(f), self.places.local_tier(f)]) for f in folders]
        command = [sys.executable, "-m", "runner.chaos.compare", *places]
        command += [f"--{name}={value}" for name, value in options.items() if value is not None]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return [f"the comparison failed: {done.stderr[-1000:]}"]
        return list(json.loads(done.stdout))

    def draw(self, scene: Scene, *, may_halve: bool) -> tuple[Fault, Moment]:
        """A fault and its moment; all kinds equally often."""
        fitting = [fault for fault in self._faults if fault.fits(scene.tiers) and (may_halve or not fault.halves)]
        if not fitting:
            raise CampaignFailed("none of the chosen faults can strike where this job's checkpoints lie")
        struck = [strike.fault for strike in self.result.strikes]
        tries = {fault.name: struck.count(fault.name) + self._num_skipped(fault.name) for fault in fitting}
        least = min(tries.values())
        fault = self.random.choice([fault for fault in fitting if tries[fault.name] == least])
        return fault, self.random.choice(fault.moments)

    @property
    def all_halve(self) -> bool:
        return all(fault.halves for fault in self._faults)

    def _num_skipped(self, name: str) -> int:
        return self.result.skipped.get(name, (0, ""))[0]

    def skip(self, fault: Fault, why: str) -> None:
        self.result.skipped[fault.name] = (self._num_skipped(fault.name) + 1, why)


class _Over(Exception):
    """The run has finished, or cannot go on."""


class _Round:
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
