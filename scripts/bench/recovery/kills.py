"""Runs of ours that are killed at random moments."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import psutil
from library.training_run import START_TIMEOUT_S, TrainingRun
from recovery.trainings import JOB, RECOVERY_LIMIT_S, SAVE_STEPS, STOP_LIMIT_S, Trainings

from checkpointing.agent.events import Log
from runner.journal.events import AttemptEnded, AttemptStarted, Backoff, RankStarted, RunStarted

KILLS_PER_RUN = 20
MOMENTS = ("start-up", "restore", "step", "save")
VICTIMS = ("rank 0", "rank 1", "launcher", "agent")


def measure_kills(trainings: Trainings, num_kills: int, source: random.Random) -> None:
    """Kill so many processes, in runs of at most `KILLS_PER_RUN`, each of which is stopped with SIGTERM."""
    run = 0
    while (done := num_killed(trainings)) < num_kills:
        run += 1
        with trainings.start_ours(*JOB, "restart.max_restarts=100000") as training:
            victims = Victims(training, source)
            why = _kill(trainings, victims, min(KILLS_PER_RUN, num_kills - done))
            if why is not None:
                trainings.hang(f"run {run}: {why} after {victims.last}", training)
            else:
                code, _ = training.stop(STOP_LIMIT_S)
                if code is None:
                    trainings.hang(f"run {run}: did not end after SIGTERM, after {victims.last}", training)
                else:
                    if code != 75:
                        trainings.problem(f"run {run}: exit code {code} after SIGTERM", training)
                    trainings.check_leftovers(training)
        hangs, orphans = len(trainings.hangs), len(trainings.orphans)
        trainings.say(f"{num_killed(trainings)}/{num_kills} kills: {hangs} hangs, {orphans} processes left")


def num_killed(trainings: Trainings) -> int:
    return sum(trainings.kills[victim] for victim in VICTIMS)


def _kill(trainings: Trainings, victims: Victims, num_kills: int) -> str | None:
    """Kill in one run, and wait for a last step; returns how it hangs, which ends it, or None."""
    for number in range(num_kills):
        # The first kill may come during the imports; later ones do so where the launcher was killed.
        moment = victims.source.choice(("import", *MOMENTS) if number == 0 else MOMENTS)
        if not victims.wait_for(moment):
            return f"did not reach the next moment ({moment})"
        victim = victims.kill(moment)
        if victim is None:
            return f"no process to kill ({moment})"
        trainings.kills.update((moment, victim))
    return None if victims.wait_for("step") else "no step"


class Victims:
    """Waits for moments of a run of ours and kills one of its processes; `last` is the last kill, in words."""

    def __init__(self, training: TrainingRun, source: random.Random) -> None:
        self._training, self.source, self.last = training, source, "the start"
        # The attempt of the last kill, and its time.
        self._killed_in, self._killed_at = 0, time.time()

    def _limit_s(self) -> float:
        """How long the next moment may take: the start's imports, or the pause before a restart, come on top."""
        waits = sum(
            entry.event.delay_s
            for entry in self._training.find(Backoff)
            if isinstance(entry.event, Backoff) and entry.time > self._killed_at
        )
        return (RECOVERY_LIMIT_S if self._killed_in else START_TIMEOUT_S) + waits

    def wait(self, find: Callable[[], list[Any]]) -> bool:
        """Wait until something is found."""
        return self._training.wait(lambda: find() or None, self._limit_s) is not None

    def wait_for(self, moment: str) -> bool:
        """Wait for a moment of the next attempt, and a random time longer; False: it did not come."""
        training, after = self._training, self._killed_in
        began = AttemptEnded if after else RunStarted
        moments: dict[str, tuple[Callable[[], list[Any]], float]] = {
            "import": (lambda: training.find(RunStarted), 8.0),
            # The pause before the restart, the fork or the imports, the rendezvous.
            "start-up": (lambda: [entry for entry in training.find(began) if entry.attempt >= after], 4.0),
            "restore": (lambda: training.find(RankStarted, after=after), 1.5),
            "step": (lambda: training.find(Log, after=after), 2.0),
            # A save follows this step.
            "save": (lambda: [s for _, s in training.steps(after=after) if (s + 1) % SAVE_STEPS == 0], 0.2),
        }
        find, delay_s = moments[moment]
        if not self.wait(find):
            return False
        time.sleep(self.source.uniform(0, delay_s))
        return True

    def kill(self, moment: str) -> str | None:
        """Kill a random living process; returns its name, None if there is none."""
        order = self.source.sample(VICTIMS, len(VICTIMS))
        victim = self._training.wait(lambda: next(filter(None, map(self._find, order)), None), RECOVERY_LIMIT_S)
        if victim is None:
            return None
        name, process = victim
        attempts, steps = self._training.find(AttemptStarted), self._training.steps()
        self._killed_in = attempts[-1].attempt if attempts else 0
        self._killed_at = time.time()
        with contextlib.suppress(psutil.Error):
            process.kill()
        step = steps[-1][1] if steps else 0
        self.last = f"the kill of {name} ({moment}, attempt {self._killed_in}, step {step})"
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
