"""The runs: one in peace, then as many under faults as it takes to strike all of them; all must end in the same bits.

A fault strikes at a random moment: while an attempt starts, while it restores, in mid-step, around a save. What comes
of it is waited for, as a user would: by the journal and by the exit code. A runner that has ended is started again, as
Kubernetes or Slurm would.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.chaos.faults import FAULTS
from runner.chaos.locations import Places
from runner.chaos.result import HALVED_TOLERANCE, UNSTEADY_TOLERANCE, Result
from runner.chaos.round import Round
from runner.chaos.run_under_test import Subject, runner_command
from runner.chaos.scene import Fault, Moment, Scene
from runner.errors import ExitCode, RunnerError
from runner.journal.journal import Event
from runner.journal.summary import summarise
from runner.system import processes

# Budgets and waits are for strangers; here faults are expected.
SETTINGS = ("restart.max_restarts=1000000", "restart.backoff_max_s=0.2", "restart.backoff_jitter_s=0.05")


class CampaignFailed(RunnerError):
    """The job does not even end well in peace."""

    exit_code = ExitCode.USAGE


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
            well = Round(self, number, folder, num_faults, seconds).run()
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
