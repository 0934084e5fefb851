"""Recovery from a killed rank, preemption, and the overhead of supervision."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence

from library.measuring import undisturbed
from library.training_run import START_TIMEOUT_S, NeverStarted, TrainingRun
from recovery.trainings import (
    FOR_INFORMATION,
    HERE,
    METHODS,
    NUM_RANKS,
    RECOVERY_LIMIT_S,
    STOP_LIMIT_S,
    Trainings,
)

from checkpointing.agent.events import Committed
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import CheckpointError
from runner.journal.events import AttemptEnded, Entry

BLOCK_LIMIT_S = 60.0
_PAIRS_PER_MESSAGE = 50


def measure_recoveries(
    trainings: Trainings, methods: Sequence[str], rounds: int, tries: int, source: random.Random
) -> None:
    """Kill a rank under each method in turns, those for information in every third round; then preempt ours."""
    measured = trainings.measured
    for number in range(rounds):
        # For all methods, between two saves: a peer's script would fail on half a checkpoint.
        kill = source.randrange(25, 36), source.uniform(0, 0.1), source.randrange(NUM_RANKS)
        chosen = [name for name in methods if name not in FOR_INFORMATION or number % 3 == 0]
        for method in source.sample(chosen, len(chosen)):
            run = functools.partial(_recovery, trainings, method, source, *kill)
            again = 1 if method in FOR_INFORMATION else tries
            try:
                seconds = undisturbed(run, METHODS[method], tries=again, say=trainings.say)
            except NeverStarted as error:
                if method not in FOR_INFORMATION:
                    raise
                trainings.say(f"left out: {error}")
                continue
            measured["recovery_s", method].append(seconds)
            text = "hangs" if seconds >= RECOVERY_LIMIT_S else f"{seconds:.2f} s"
            if method == "ours" and measured["preempt_s", method]:
                text += f", SIGTERM → exit {measured['preempt_s', method][-1]:.2f} s"
            trainings.say(f"round {number + 1}/{rounds}, {METHODS[method]}: {text}")


def _recovery(trainings: Trainings, method: str, source: random.Random, step: int, delay_s: float, rank: int) -> float:
    """Return the seconds from a rank's SIGKILL to the next step of the new process group; the limit if it hangs.

    Ours is preempted afterwards.
    """
    with trainings.start(method) as training:
        before = training.wait_for_step(step)
        time.sleep(delay_s)
        victim = training.rank(rank)
        assert victim is not None, f"{method}: rank {rank} is gone"
        killed_at = time.time()
        victim.kill()

        def next_step() -> tuple[Entry, int] | None:
            steps = training.steps()
            return next((s for s in steps if s[0].time > killed_at and s[0].attempt != before.attempt), None)

        found = training.wait(next_step, RECOVERY_LIMIT_S)
        if found is not None and method == "ours":
            _preempt(trainings, training, before.attempt, found[1] + source.randrange(5, 20), source.uniform(0, 0.1))
        if found is None and method not in FOR_INFORMATION:
            trainings.say(f"{METHODS[method]} did not come back; its output ends with:\n{training.tail(1000)}")
    return found[0].time - killed_at if found is not None else RECOVERY_LIMIT_S


def _preempt(trainings: Trainings, training: TrainingRun, crashed: int, step: int, delay_s: float) -> None:
    """Send SIGTERM to the supervisor some time after a step; check its exit code and the commit of the last step.

    The attempt that crashed before may have had a higher step.
    """
    training.wait_for_step(step, after=crashed)
    time.sleep(delay_s)
    code, seconds = training.stop(STOP_LIMIT_S)
    ends = training.all(AttemptEnded, after=crashed)
    last = max([step for _, step in training.steps(after=crashed)] + [end.step for end in ends])
    committed: int | None = None
    with contextlib.suppress(CheckpointError, IndexError, OSError):
        catalog = open_tiers(str(training.folder / "checkpoints"), None).catalog
        newest = catalog.committed_steps()[-1]
        catalog.verify(newest)
        committed = newest
    if code != 75 or committed != last:
        text = f"preempted: exit code {code}, step {last}, newest valid checkpoint {committed}"
        trainings.problem(text, training)
        seconds = max(seconds, STOP_LIMIT_S)
    commits = [commit.duration_s or 0.0 for commit in training.all(Committed) if commit.step == committed]
    trainings.measured["preempt_s", "ours"].append(seconds)
    trainings.measured["commit_s", "ours"] += commits[-1:]
    trainings.check_leftovers(training)


def measure_overhead(trainings: Trainings, num_pairs: int, seed: int) -> None:
    """Measure pairs of steps with and without supervision, and an account of what supervision does."""
    output = trainings.scratch / "pairs.jsonl"
    script = [str(HERE / "steps.py"), str(output), str(num_pairs), str(seed)]
    with trainings.start_ours(script=script) as training:

        def lines() -> list[str]:
            return output.read_text().splitlines() if output.exists() else []

        for done in range(0, num_pairs, _PAIRS_PER_MESSAGE):
            target = min(done + _PAIRS_PER_MESSAGE, num_pairs)
            reached = functools.partial(lambda target: len(lines()) >= target or None, target)
            limit = BLOCK_LIMIT_S * 3 + (START_TIMEOUT_S if done == 0 else 0)
            if training.wait(reached, limit) is None:
                raise SystemExit(f"no progress after {len(lines())} pairs of blocks:\n{training.tail(3000)}")
            trainings.say(f"{target}/{num_pairs} pairs of blocks with and without supervision")
        training.wait(lambda: None, STOP_LIMIT_S)
        if training.process.poll() != 0:
            trainings.problem(f"the pairs of blocks ended with exit code {training.process.poll()}", training)
        trainings.check_leftovers(training)
        *pairs, account = [json.loads(line) for line in lines()]
    measured = trainings.measured
    for name in ("supervised", "plain"):
        measured["pairs", name] = [pair[name] for pair in pairs]
    cores = min(os.cpu_count() or 1, NUM_RANKS)
    step_s = statistics.median(measured["pairs", "plain"])
    measured["overhead", "callbacks"] = [account["callbacks_s"] / step_s]
    measured["overhead", "the flag exchange's threads"] = [account["threads_s"] / step_s]
    measured["overhead", "other processes"] = [account["others_cpu_s"] / account["wall_s"] / cores]
