"""Recovery from a killed rank, preemption, and the overhead of supervision."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import undisturbed
from recovery_figures import Measured
from recovery_trainings import (
    FOR_INFORMATION,
    HERE,
    METHODS,
    NUM_RANKS,
    RECOVERY_LIMIT_S,
    STOP_LIMIT_S,
    Findings,
    Trainings,
)
from training_run import START_TIMEOUT_S, NeverStarted, TrainingRun

from checkpointing.agent.events import Committed
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import CheckpointError
from runner.journal.events import AttemptEnded, Entry

BLOCK_LIMIT_S = 60.0
_PAIRS_PER_MESSAGE = 50


@dataclass(frozen=True)
class Kill:
    """The step, delay and rank of a kill, the same for all methods of a round."""

    step: int
    delay_s: float
    rank: int


class Recoveries:
    """Kills a rank of a training under each method, in turns; ours is preempted afterwards."""

    def __init__(
        self, trainings: Trainings, measured: Measured, findings: Findings, seed: int, say: Callable[[str], None]
    ) -> None:
        self._trainings, self._measured, self._findings, self._say = trainings, measured, findings, say
        self._random = random.Random(seed)

    def measure(self, methods: Sequence[str], rounds: int, *, tries: int) -> None:
        """Measure all methods in turns; those for information in every third round."""
        for number in range(rounds):
            kill = self._draw()
            chosen = [name for name in methods if name not in FOR_INFORMATION or number % 3 == 0]
            for method in self._random.sample(chosen, len(chosen)):
                run = functools.partial(self._recovery, method, kill)
                again = 1 if method in FOR_INFORMATION else tries
                try:
                    seconds = undisturbed(run, METHODS[method], tries=again, say=self._say)
                except NeverStarted as error:
                    if method not in FOR_INFORMATION:
                        raise
                    self._say(f"left out: {error}")
                    continue
                self._measured.recovery_s[method].append(seconds)
                text = "hangs" if seconds is None else f"{seconds:.2f} s"
                if method == "ours" and self._measured.preempt_s:
                    text += f", SIGTERM → exit {self._measured.preempt_s[-1]:.2f} s"
                self._say(f"round {number + 1}/{rounds}, {METHODS[method]}: {text}")

    def _draw(self) -> Kill:
        """Draw a kill between two saves: a peer's script would fail on half a checkpoint."""
        return Kill(self._random.randrange(25, 36), self._random.uniform(0, 0.1), self._random.randrange(NUM_RANKS))

    def _recovery(self, method: str, kill: Kill) -> float | None:
        """Return the seconds from a rank's SIGKILL to the next step that the new process group finishes.

        None: it hung. Ours is preempted afterwards.
        """
        with self._trainings.start(method) as training:
            before = training.wait_for_step(kill.step)
            time.sleep(kill.delay_s)
            victim = training.rank(kill.rank)
            assert victim is not None, f"{method}: rank {kill.rank} is gone"
            killed_at = time.time()
            victim.kill()

            def next_step() -> tuple[Entry, int] | None:
                steps = training.steps()
                return next((s for s in steps if s[0].time > killed_at and s[0].attempt != before.attempt), None)

            found = training.wait(next_step, RECOVERY_LIMIT_S)
            if found is not None and method == "ours":
                self._preempt(training, before.attempt, found[1] + self._random.randrange(5, 20))
            if found is None and method not in FOR_INFORMATION:
                self._say(f"{METHODS[method]} did not come back; its output ends with:\n{training.tail(1000)}")
        return found[0].time - killed_at if found is not None else None

    def _preempt(self, training: TrainingRun, crashed: int, step: int) -> None:
        """Send SIGTERM to the supervisor in mid-training; check its exit code and the commit of the last step.

        Args:
            training: Of ours.
            crashed: The attempt before, whose last step may have been higher.
            step: To wait for.
        """
        training.wait_for_step(step, after=crashed)
        time.sleep(self._random.uniform(0, 0.1))
        code, seconds = training.stop(STOP_LIMIT_S)
        ends = [e.event for e in training.find(AttemptEnded, after=crashed) if isinstance(e.event, AttemptEnded)]
        last = max([step for _, step in training.steps(after=crashed)] + [end.step for end in ends])
        committed: int | None = None
        with contextlib.suppress(CheckpointError, IndexError, OSError):
            catalog = open_tiers(str(training.folder / "checkpoints"), None).catalog
            newest = catalog.committed_steps()[-1]
            catalog.verify(newest)
            committed = newest
        if code != 75 or committed != last:
            text = f"preempted: exit code {code}, step {last}, newest valid checkpoint {committed}"
            self._findings.problem(text, training)
            seconds = max(seconds, STOP_LIMIT_S)
        commits = [e.event for e in training.find(Committed) if isinstance(e.event, Committed)]
        self._measured.preempt_s.append(seconds)
        self._measured.commit_s += [commit.duration_s or 0.0 for commit in commits if commit.step == committed][-1:]
        self._findings.check_leftovers(training)


def measure_overhead(
    trainings: Trainings,
    measured: Measured,
    findings: Findings,
    num_pairs: int,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Measure pairs of steps with and without supervision, and an account of what supervision does."""
    with trainings.folder() as folder:
        output = folder.parent / "pairs.jsonl"
        script = [str(HERE / "recovery_steps.py"), str(output), str(num_pairs), str(seed)]
        with trainings.start_ours(folder, script=script) as training:

            def lines() -> list[str]:
                return output.read_text().splitlines() if output.exists() else []

            done = 0
            while done < num_pairs:
                target = min(done + _PAIRS_PER_MESSAGE, num_pairs)
                reached = functools.partial(lambda target: len(lines()) >= target or None, target)
                limit = BLOCK_LIMIT_S * 3 + (START_TIMEOUT_S if done == 0 else 0)
                if training.wait(reached, limit) is None:
                    raise SystemExit(f"no progress after {len(lines())} pairs of blocks:\n{training.tail(3000)}")
                done = target
                say(f"{done}/{num_pairs} pairs of blocks with and without supervision")
            training.wait(lambda: None, STOP_LIMIT_S)
            if training.process.poll() != 0:
                findings.problem(f"the pairs of blocks ended with exit code {training.process.poll()}", training)
            findings.check_leftovers(training)
            *pairs, account = [json.loads(line) for line in lines()]
    measured.pairs = [(pair["supervised"], pair["plain"]) for pair in pairs]
    cores = min(os.cpu_count() or 1, NUM_RANKS)
    step_s = statistics.median(plain for _, plain in measured.pairs)
    measured.overhead = {
        "callbacks": account["callbacks_s"] / step_s,
        "the flag exchange's threads": account["threads_s"] / step_s,
        "other processes": account["others_cpu_s"] / account["wall_s"] / cores,
    }
