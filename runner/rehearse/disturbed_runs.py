"""Runs the first steps of a job undisturbed, again, and then disturbed at chosen moments, and compares them."""

from __future__ import annotations

import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpointing.agent.events import Committed, Event, SnapshotCost, StepsRepeated, TrainingStarted
from checkpointing.commit.catalog import read_file
from checkpointing.commit.tiers import open_tiers
from checkpointing.format.layout import PER_RANK_PREFIXES, step_record_name
from checkpointing.format.step_record import FIELDS, GENERATORS, first_difference
from checkpointing.host.failpoints import FAILPOINTS_ENV, ONCE_ENV
from runner.chaos.run_under_test import JobUnderTest, RunUnderTest, stored_differences
from runner.errors import ExitCode, RunnerError

# Waiting before a restart is not what is rehearsed. What differs is compared here, so that nothing ends early.
_SETTINGS = (
    *("restart.max_restarts=20", "restart.backoff_max_s=0.2", "restart.backoff_jitter_s=0.05"),
    *("checkpoint.local_tier=null", "resume.verify=auto", "monitoring.port=null"),
)
_MOST_STARTS = 4
_UNCOVERED = re.compile(r"training has changed what no checkpoint holds: (.*?)\. A resumed run", re.DOTALL)


class RehearsalFailed(RunnerError):
    """The job fails without any disturbance, or saves nothing."""

    exit_code = ExitCode.DETERMINISTIC


@dataclass(frozen=True)
class Disturbance:
    """When a job is disturbed, and how.

    Attributes:
        name: For people.
        failpoints: Value of `FAILPOINTS_ENV`, with `{early}` and `{middle}` for steps between saves.
        is_stop: SIGTERM is sent to the runner there, which is started again.
        is_optional: Only with `--all`.
        why_not: Why it may not be reached.
    """

    name: str
    failpoints: str
    is_stop: bool = False
    is_optional: bool = False
    why_not: str = ""


MOMENTS = (
    Disturbance("killed in a step", "training.step=kill@{middle}"),
    Disturbance("killed at the first step", "training.step=kill@1"),
    Disturbance("killed while a snapshot is copied", "snapshot.copying=kill@2"),
    Disturbance("killed while a checkpoint is written", "local.renamed=kill@1"),
    Disturbance("killed while it evaluates", "training.evaluation=kill@2", why_not="the job evaluates nothing"),
    Disturbance("killed at an epoch's end", "training.epoch=kill@1", why_not="no epoch ends in these steps"),
    Disturbance("stopped by SIGTERM", "training.step=pause@{early}", is_stop=True),
    Disturbance("disk full while it saves", "local.write=full@2", is_optional=True),
)


@dataclass
class Rehearsed:
    """What a run was like.

    Attributes:
        name: When it was disturbed; "undisturbed" and "again" for the first two.
        reached: Whether the moment came.
        difference: How it differs from the undisturbed run; empty where it has the same bits.
        first: The first step that differs, and what differs in it; None where no step does.
        recovery_s: Seconds from the disturbance to the next training.
        seconds: How long it took.
    """

    name: str
    reached: bool = True
    difference: str = ""
    first: tuple[int, tuple[str, ...]] | None = None
    recovery_s: float | None = None
    seconds: float = 0.0


@dataclass
class Costs:
    """Medians of what the undisturbed runs have measured, in seconds; None where nothing was."""

    step_s: float | None = None
    snapshot_s: float | None = None
    commit_s: float | None = None
    commit_cpu_s: float | None = None


@dataclass
class Findings:
    """All that a rehearsal has found.

    Attributes:
        outcomes: Of each run, the undisturbed one first.
        by_itself: How two undisturbed runs differ; empty where they do not.
        uncovered: What training changes and no checkpoint holds.
        hints: What resumed runs have said of steps that differ.
    """

    outcomes: list[Rehearsed] = field(default_factory=list)
    by_itself: str = ""
    uncovered: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
    seconds: float = 0.0

    @property
    def is_safe(self) -> bool:
        """Whether every run that was disturbed ended with the bits of the undisturbed one."""
        return not any(outcome.difference for outcome in self.outcomes)


class RehearsedJob:
    """A job in a folder of its own, whose runs are compared with its first one.

    Args:
        folder: Holds the folders of all runs.
        job: Whose runs are compared.
        steps: Steps of each run.
        limit_s: Seconds that a run may take.
        report: Takes progress, a line at a time.
    """

    def __init__(
        self,
        folder: Path,
        job: JobUnderTest,
        *,
        steps: int,
        limit_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._steps, self._limit_s, self._print = steps, limit_s, report
        self._save_steps = max(steps // 3, 1)
        self._job = replace(job, length=(steps, self._save_steps))
        self.findings = Findings()
        # Generators that the script does not seed, by their names in a record.
        self._unseeded = set[str]()

    def rehearse(self, moments: Sequence[Disturbance]) -> Findings:
        """Run the job undisturbed, again, and disturbed at each moment.

        Raises:
            RehearsalFailed: It fails undisturbed, or saves nothing.
        """
        began = time.monotonic()
        findings = self.findings
        for name in ("undisturbed", "again"):
            findings.outcomes.append(self._run(name, None))
        control = findings.outcomes[1]
        findings.by_itself, control.difference = control.difference, ""
        for moment in moments:
            findings.outcomes.append(self._run(moment.name, moment))
        findings.seconds = time.monotonic() - began
        return findings

    def _run(self, name: str, moment: Disturbance | None) -> Rehearsed:
        folder = self._folder / name.replace(" ", "-").replace("'", "")
        fired = folder / "fired"
        fired.mkdir(parents=True)
        environment = self._job.environment(folder)
        if moment is not None:
            # Snapshots are of even steps: so one step at least is recorded after the newest, and repeated.
            middle = (self._steps - self._save_steps + 2) // 2 * 2
            armed = moment.failpoints.format(early=self._save_steps + 1, middle=middle)
            environment |= {FAILPOINTS_ENV: armed, ONCE_ENV: str(fired)}
        job = self._job.with_settings(f"checkpoint.location={folder / 'checkpoints'}", *_SETTINGS)
        outcome, began = Rehearsed(name), time.monotonic()
        with RunUnderTest(job.command(folder), folder, environment, alone=False) as run:
            self._await_end(run, outcome, fired if moment is not None and moment.is_stop else None)
            run.refresh()
            self._take(run, outcome)
        outcome.seconds = time.monotonic() - began
        disturbed = sorted(fired.iterdir(), key=lambda path: path.stat().st_mtime)
        outcome.reached = moment is None or bool(disturbed)
        if name != "undisturbed" and outcome.reached and not outcome.difference:
            self._compare(outcome, folder)
        if disturbed:
            outcome.recovery_s = _recovery(run, disturbed[0].stat().st_mtime)
        if not outcome.reached:
            assert moment is not None
            self._print(f"{name}: not reached{f' ({moment.why_not})' if moment.why_not else ''}")
        else:
            again = f", training again after {outcome.recovery_s:.1f} s" if outcome.recovery_s is not None else ""
            verdict = outcome.difference or ("done" if name == "undisturbed" else "the same bits")
            self._print(f"{name}: {verdict} ({outcome.seconds:.0f} s{again})")
        return outcome

    def _await_end(self, run: RunUnderTest, outcome: Rehearsed, stops_at: Path | None) -> None:
        """Wait until the run has finished; send the signal once `stops_at` says that its moment has come."""
        deadline = time.monotonic() + self._limit_s
        for number in range(_MOST_STARTS):
            while run.process.poll() is None:
                if time.monotonic() > deadline:
                    self._fail(run, f"it did not end its {self._steps} steps in {self._limit_s:.0f} s")
                if stops_at is not None and any(stops_at.iterdir()):
                    run.process.send_signal(signal.SIGTERM)
                    stops_at = None
                time.sleep(0.05)
            code = run.process.returncode
            if code == ExitCode.DONE:
                return
            if outcome.name in ("undisturbed", "again"):
                self._fail(run, f"it exits with {code} undisturbed")
            if code not in (ExitCode.PREEMPTED, ExitCode.BUDGET_SPENT) or number == _MOST_STARTS - 1:
                outcome.difference = f"it ends with exit code {code}, and does not resume"
                return
            run.start()

    def _fail(self, run: RunUnderTest, why: str) -> None:
        run.refresh()
        text = f"rehearsal failed: {why}; the end of {run.folder / 'output.log'}:\n{run.tail(1500)}"
        raise RehearsalFailed(text)

    def _take(self, run: RunUnderTest, outcome: Rehearsed) -> None:
        """Note what a run has measured and said."""
        findings, text = self.findings, (run.folder / "output.log").read_text(errors="replace")
        for found in _UNCOVERED.findall(text):
            findings.uncovered += [name for name in found.split(", ") if name not in findings.uncovered]
        for event in run.all(StepsRepeated):
            if event.differs and not event.by_itself:
                findings.hints.append(f"{outcome.name}: {event.describe()}")
        if outcome.name == "undisturbed":
            findings.costs = _costs(run)
            if not run.all(Committed):
                self._fail(run, "it saves nothing through CheckpointManager or resilient()")

    def _compare(self, outcome: Rehearsed, folder: Path) -> None:
        """Compare a run's records and last checkpoint with those of the undisturbed run."""
        reference = self._folder / "undisturbed"
        (mine, step), (theirs, last) = _records(folder), _records(reference)
        if step != last:
            outcome.difference = f"it ends at step {step} instead of {last}"
            return
        if outcome.name == "again":
            self._find_unseeded(theirs, mine)
        pairs = [(theirs[name], mine.get(name, b"")) for name in theirs]
        found = [one for pair in pairs if (one := first_difference(*pair, self._unseeded)) is not None]
        outcome.first = min(found, default=None)
        if outcome.first is not None:
            number, differs = outcome.first
            outcome.difference = f"step {number} differs: {', '.join(differs)}"
            return
        differences = stored_differences((str(reference / "checkpoints"), None), (str(folder / "checkpoints"), None))
        if self._unseeded:
            differences = [text for text in differences if not text.startswith(PER_RANK_PREFIXES)]
        outcome.difference = "; ".join(differences[:3])

    def _find_unseeded(self, theirs: dict[str, bytes], mine: dict[str, bytes]) -> None:
        """Find the generators that differ between two undisturbed runs of which nothing else differs."""
        others = [name for name in FIELDS if name not in GENERATORS]
        for name in theirs:
            found = first_difference(theirs[name], mine.get(name, b""), others)
            if found is not None and first_difference(theirs[name], mine.get(name, b""), GENERATORS) is None:
                self._unseeded.update(found[1])


def _records(folder: Path) -> tuple[dict[str, bytes], int]:
    """Return each rank's step record in the last checkpoint of a run, by name, and its step."""
    entry = next(entry for entry in open_tiers(str(folder / "checkpoints"), None).catalog.scan() if entry.manifest)
    assert entry.manifest is not None
    names = [step_record_name(rank) for rank in range(entry.manifest.world_size)]
    return {name: read_file(entry.storage, entry.manifest, name) for name in names}, entry.step


def _recovery(run: RunUnderTest, disturbed_at: float) -> float | None:
    begun = [entry.time for entry in run.entries if isinstance(entry.event, TrainingStarted)]
    return next((at - disturbed_at for at in begun if at > disturbed_at), None)


def _costs(run: RunUnderTest) -> Costs:
    def median(kind: type[Event], value: Callable[[Event], float | None]) -> float | None:
        found = [one for event in run.all(kind) if (one := value(event)) is not None]
        return statistics.median(found) if found else None

    begun = [entry.time for entry in run.entries if isinstance(entry.event, TrainingStarted)]
    ended = [entry.time for entry in run.entries if isinstance(entry.event, Committed)]
    steps = max((event.step for event in run.all(Committed)), default=0)
    return Costs(
        step_s=(ended[-1] - begun[0]) / steps if begun and ended and steps else None,
        snapshot_s=median(SnapshotCost, lambda event: getattr(event, "cost_s", None)),
        commit_s=median(Committed, lambda event: getattr(event, "duration_s", None)),
        commit_cpu_s=median(Committed, lambda event: getattr(event, "cpu_s", None)),
    )
