"""A fault-free run, then runs under faults until enough were injected; all must end bit-identical.

A fault is injected at a random moment: while an attempt starts, while it restores, in mid-step, around a save. Its
consequences are observed as a user would: by the journal and by the exit code. A runner that exited is started again,
as Kubernetes or Slurm would.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing.format.layout import PER_RANK_PREFIXES
from runner.chaos.faults import FAULTS
from runner.chaos.round import Round
from runner.chaos.run_under_test import JobUnderTest, RunUnderTest, stored_differences
from runner.chaos.scene import CampaignFailed, Fault, JobPace, Locations, prepare_scene
from runner.chaos.verdict import HALVED_TOLERANCE, NONDETERMINISTIC_TOLERANCE, Result
from runner.journal.events import Entry
from runner.journal.summary import summarise
from runner.system import processes

# Faults are expected here, so neither the restart budget nor the backoff may end or delay a run.
SETTINGS = ("restart.max_restarts=1000000", "restart.backoff_max_s=0.2", "restart.backoff_jitter_s=0.05")
# Rounds in a row without any fault (none was applicable) after which the campaign ends.
_MAX_EMPTY_ROUNDS = 3


class Campaign:
    """A job, its fault-free run, and the faults that the job should survive."""

    def __init__(
        self,
        folder: Path,
        job: JobUnderTest,
        *,
        locations: Locations,
        seed: int,
        faults: Sequence[Fault] = FAULTS,
        tolerance: float | None = None,
        alone: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        """Prepare a campaign.

        Args:
            folder: Holds the folders of all runs.
            job: Whose runs are disturbed.
            locations: Where the runs keep their checkpoints.
            seed: Of faults and moments.
            faults: The kinds of faults to inject.
            tolerance: Share of a tensor's norm by which results may differ; None for bit-identical.
            alone: Whether this process has started nothing else; otherwise its runs do not end all that it has started.
            report: Receives progress, a line at a time.
        """
        self._folder, self._locations = folder, locations
        self._job = job.with_settings(*SETTINGS)
        self._random = random.Random(seed)
        self._faults, self._tolerance, self._print = list(faults), tolerance, report
        self._began, self._alone = time.monotonic(), alone
        self.result = Result()

    def run(self, num_faults: int, *, seconds: float | None = None, keep: bool = False) -> Result:
        """Inject at least this many faults, for at least this long; `keep` the folders of runs that passed, too.

        Raises:
            CampaignFailed: The job fails without faults.
        """
        processes.become_subreaper()
        pace = self.run_reference()
        is_enough = functools.partial(self.is_enough, num_faults, seconds)
        num_empty = 0
        while not is_enough() and num_empty < _MAX_EMPTY_ROUNDS:
            before = len(self.result.injections)
            folder = self._folder / f"run-{self.result.runs + 1}"
            if self._run_round(folder, pace, is_enough) and not keep:
                self._locations.remove(folder)
            num_empty = num_empty + 1 if len(self.result.injections) == before else 0
        self.result.total_s = time.monotonic() - self._began
        return self.result

    def is_enough(self, num_faults: int, seconds: float | None) -> bool:
        """Return whether so many faults were injected, and so much time has passed."""
        done = len(self.result.injections) >= num_faults
        return done and (seconds is None or time.monotonic() - self._began >= seconds)

    def report(self, text: str) -> None:
        """Report progress, with the seconds since the beginning."""
        self._print(f"[{time.monotonic() - self._began:6.0f} s] {text}")

    def _make_run(
        self, folder: Path, environment: dict[str, str], on_start: Callable[[int], None] = lambda pid: None
    ) -> RunUnderTest:
        folder.mkdir(parents=True, exist_ok=True)
        command = self._job.command(folder, *self._locations.settings(folder))
        return RunUnderTest(
            command, folder, {**self._job.environment(folder), **environment}, on_start, alone=self._alone
        )

    def _run_round(self, folder: Path, pace: JobPace, is_enough: Callable[[], bool]) -> bool:
        """Run the job under faults and compare it with the fault-free run; return whether it passed."""
        result = self.result
        result.runs += 1
        number, before = result.runs, len(result.all_violations)
        with prepare_scene(folder, self._locations, self._random, self._make_run) as scene:
            current = Round(number, scene, self._faults, pace, result, self.report)
            finished = current.run(is_enough)
            result.violations += [f"run {number}: {text}" for text in current.violations]
            is_halved = current.is_halved
            differences = self.compare(folder, is_halved=is_halved) if finished else ["the run did not finish"]
        if not differences:
            result.identical, result.close = result.identical + (not is_halved), result.close + is_halved
        how = f"passed (micro-batch halved, losses within {HALVED_TOLERANCE:.0%})" if is_halved else "passed"
        return self.judge(number, before, differences, how)

    def judge(self, number: int, before: int, differences: Sequence[str], how: str = "passed") -> bool:
        """Record and report how a run has ended, and return whether it passed.

        `before` is the number of violations before it, and `how` the verdict if all is as in the fault-free run.
        """
        result = self.result
        result.differences += [f"run {number}: {text}" for text in differences]
        new_violations = result.all_violations[before:]
        passed = not differences and not new_violations
        self.report(f"run {number}: {how if passed else 'FAILED'}, {len(result.injections)} faults so far")
        for text in [*new_violations, *differences]:
            self.report(f"  {text}")
        return passed

    def run_reference(self) -> JobPace:
        """Run the job without faults; returns its pace.

        Raises:
            CampaignFailed: It fails, or commits nothing.
        """
        self.report("the fault-free run")
        self._reference_folder = self._folder / "reference"
        run = summarise(self._run_fault_free(self._reference_folder))
        if not run.committed:
            raise CampaignFailed(
                f"the job committed no checkpoint; see {self._reference_folder / 'output.log'}. A configured job needs "
                "trainer.save_steps below its number of steps, a program of your own what `runner start` can protect"
            )
        # What a program says of its number of steps may be unknown, or that of more than a rehearsal.
        steps = max(run.committed)
        self.result.steps = steps
        attempt = run.attempts[-1]
        trained_s = (attempt.last_step_at or 0.0) - (attempt.training_began or 0.0)
        pace = JobPace(steps, max(trained_s / max(steps, 1), 1e-3))
        self.report(f"{pace.steps} steps of {pace.step_s:.3f} s")
        return pace

    def _run_fault_free(self, folder: Path) -> list[Entry]:
        with self._make_run(folder, {}) as run:
            code = run.process.wait()
            run.refresh()
            if code != 0:
                raise CampaignFailed(
                    f"the job exits with {code} without any fault; fix that first. The end of "
                    f"{run.folder / 'output.log'}:\n{run.tail(2000)}"
                )
        return run.entries

    @functools.cached_property
    def _unseeded(self) -> set[str]:
        """Files of generators that nobody seeds: of a second fault-free run, only they differ from the first one.

        If anything else differs, the result is nondeterministic from then on.
        """
        self.report("results differ: repeating the fault-free run to see whether the job is deterministic")
        folder = self._folder / "reference-again"
        self._run_fault_free(folder)
        differences = self.differences(folder)
        of_ranks = [text for text in differences if text.startswith(PER_RANK_PREFIXES)]
        others = [text for text in differences if text not in of_ranks]
        if others:
            self.result.nondeterministic = True
            self.report(
                f"the job is nondeterministic: two fault-free runs differ ({others[0]}). From now on results are "
                f"compared within {NONDETERMINISTIC_TOLERANCE:g} of each tensor's norm; try deterministic algorithms "
                "(--deterministic for a configured job)"
            )
        names = {_file_of(text) for text in of_ranks}
        if names:
            self.report(f"two fault-free runs differ in generators that nobody seeds: {', '.join(sorted(names))}")
        return names

    def compare(self, folder: Path, *, is_halved: bool = False) -> list[str]:
        """Return what differs between the last checkpoints of a run and of the fault-free run."""
        if is_halved:
            return self.differences(folder, losses=HALVED_TOLERANCE)
        is_relaxed = self.result.nondeterministic and self._tolerance is None
        tolerance = NONDETERMINISTIC_TOLERANCE if is_relaxed else self._tolerance
        differences = self.differences(folder, tolerance=tolerance)
        if not differences or self._tolerance is not None:
            return differences
        unseeded = self._unseeded
        if self.result.nondeterministic and not is_relaxed:
            differences = self.differences(folder, tolerance=NONDETERMINISTIC_TOLERANCE)
        return [text for text in differences if _file_of(text) not in unseeded]

    def differences(self, folder: Path, *flags: str, **options: float | None) -> list[str]:
        """Return what differs between the last checkpoints of the fault-free run and of the one in `folder`.

        Flags and options are those of `runner.chaos.compare`.
        """
        first, second = (
            (self._locations.location(one), self._locations.local_tier(one)) for one in (self._reference_folder, folder)
        )
        return stored_differences(first, second, *flags, **options)


def _file_of(difference: str) -> str:
    """Return the name of the file that a difference of two checkpoints is about."""
    return difference.split()[0].rstrip(":")
