"""Runs of ours that are killed at random moments."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

import psutil
from recovery_figures import Measured
from recovery_trainings import JOB, RECOVERY_LIMIT_S, SAVE_STEPS, STOP_LIMIT_S, Findings, Trainings
from training_run import START_TIMEOUT_S, TrainingRun

from checkpointing.agent.events import Event, Log
from runner.journal.events import AttemptEnded, AttemptStarted, Backoff, Entry, RankStarted, RunStarted

KILLS_PER_RUN = 20
MOMENTS = ("start-up", "restore", "step", "save")
VICTIMS = ("rank 0", "rank 1", "launcher", "agent")


class KillRuns:
    """Kills processes of runs at random moments, then stops the run with SIGTERM."""

    def __init__(
        self, trainings: Trainings, measured: Measured, findings: Findings, seed: int, say: Callable[[str], None]
    ) -> None:
        self._trainings, self._measured, self._findings, self._say = trainings, measured, findings, say
        self._random = random.Random(seed)

    def measure(self, num_kills: int) -> None:
        """Kill so many processes, in runs of at most `KILLS_PER_RUN`."""
        run = 0
        while self._measured.num_kills < num_kills:
            run += 1
            self._run(min(KILLS_PER_RUN, num_kills - self._measured.num_kills), f"run {run}")
            self._say(
                f"{self._measured.num_kills}/{num_kills} kills: {len(self._findings.hangs)} hangs, "
                f"{len(self._findings.orphans)} processes left"
            )

    def _run(self, num_kills: int, name: str) -> None:
        """Kill in one run; a hang ends it."""
        with (
            self._trainings.folder() as folder,
            self._trainings.start_ours(folder, *JOB, "restart.max_restarts=100000") as training,
        ):
            victims = Victims(training, self._random)
            last = "the start"
            for number in range(num_kills):
                # The first kill may come during the imports; later ones do so where the launcher was killed.
                moment = self._random.choice(("import", *MOMENTS) if number == 0 else MOMENTS)
                if not victims.wait_for(moment):
                    self._findings.hang(f"{name}: did not reach the next moment ({moment}) after {last}", training)
                    return
                victim = victims.kill()
                if victim is None:
                    self._findings.hang(f"{name}: no process to kill ({moment}) after {last}", training)
                    return
                attempt = f"attempt {victims.killed_in}"
                last = f"the kill of {victim} ({moment}, {attempt}, step {victims.step})"
                self._measured.count_kill(moment, victim)
            if victims.wait_for_entry(Log) is None:
                self._findings.hang(f"{name}: no step after {last}", training)
                return
            code, _ = training.stop(STOP_LIMIT_S)
            if code is None:
                self._findings.hang(f"{name}: did not end after SIGTERM, after {last}", training)
                return
            if code != 75:
                self._findings.problem(f"{name}: exit code {code} after SIGTERM", training)
            self._findings.check_leftovers(training)


class Victims:
    """Waits for moments of a run of ours and kills one of its processes.

    Attributes:
        killed_in: The attempt of the last kill.
    """

    def __init__(self, training: TrainingRun, source: random.Random) -> None:
        self._training, self._random = training, source
        self.killed_in = 0
        self._killed_at = time.time()

    def _limit_s(self) -> float:
        """How long the next moment may take: the start's imports, or the pause before a restart, come on top."""
        waits = sum(
            entry.event.delay_s
            for entry in self._training.find(Backoff)
            if isinstance(entry.event, Backoff) and entry.time > self._killed_at
        )
        return (RECOVERY_LIMIT_S if self.killed_in else START_TIMEOUT_S) + waits

    def wait_for_entry(self, kind: type[Event]) -> Entry | None:
        """Wait for an event of an attempt that is newer than the last that was killed."""
        return self._training.wait(
            lambda: next(iter(self._training.find(kind, after=self.killed_in)), None), self._limit_s
        )

    def _wait_for_step_before_save(self) -> Entry | None:
        def found() -> Entry | None:
            steps = self._training.steps(after=self.killed_in)
            return next((entry for entry, step in steps if step % SAVE_STEPS == SAVE_STEPS - 1), None)

        return self._training.wait(found, self._limit_s)

    def wait_for(self, moment: str) -> bool:
        """Wait for a moment of the next attempt, and a random time longer; False: it did not come."""
        match moment:
            case "import":
                came = bool(self._training.wait(lambda: self._training.find(RunStarted) or None, START_TIMEOUT_S))
                delay_s = 8.0
            case "start-up":  # The pause before the restart, the fork or the imports, the rendezvous.
                kind = AttemptEnded if self.killed_in else RunStarted

                def ended() -> bool | None:
                    return any(entry.attempt >= self.killed_in for entry in self._training.find(kind)) or None

                came = bool(self._training.wait(ended, self._limit_s))
                delay_s = 4.0
            case "restore":
                came, delay_s = bool(self.wait_for_entry(RankStarted)), 1.5
            case "step":
                came, delay_s = bool(self.wait_for_entry(Log)), 2.0
            case _:  # A save follows this step.
                came, delay_s = bool(self._wait_for_step_before_save()), 0.2
        if not came:
            return False
        time.sleep(self._random.uniform(0, delay_s))
        return True

    def kill(self) -> str | None:
        """Kill a random living process; returns its name, None if there is none."""
        order = self._random.sample(VICTIMS, len(VICTIMS))
        victim = self._training.wait(lambda: next(filter(None, map(self._find, order)), None), RECOVERY_LIMIT_S)
        if victim is None:
            return None
        name, process = victim
        attempts = self._training.find(AttemptStarted)
        self.killed_in = attempts[-1].attempt if attempts else 0
        self._killed_at = time.time()
        with contextlib.suppress(psutil.Error):
            process.kill()
        return name

    def _find(self, name: str) -> tuple[str, psutil.Process] | None:
        match name:
            case "launcher":
                process = self._training.helper("runner.launcher.launcher")
            case "agent":
                process = self._training.helper("checkpointing.agent")
            case _:
                process = self._training.rank(int(name.removeprefix("rank ")))
        return (name, process) if process is not None else None

    @property
    def step(self) -> int:
        """The newest step that was reported."""
        steps = self._training.steps()
        return steps[-1][1] if steps else 0
