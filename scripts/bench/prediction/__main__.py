"""Does `runner simulate` predict what happens? The bundled job under random kills, its goodput against the forecast.

One run with a few kills gives the simulation the durations of this machine (`--from`). Then the job runs repeatedly,
with kills at times from an exponential distribution, drawn separately for each run. Two predictions are compared with
the goodput in the runs' ledgers: a simulation of exactly the failures of each run, and, for the mean of all runs, the
forecast from the mean time between failures alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import Benchmark
from library.figures import bar_table, table
from library.measuring import scratch_folder
from library.training_run import TrainingRun, start_command
from library.workers import ENVIRONMENT

from checkpointing.agent.events import TrainingStarted
from runner.journal.events import AttemptEnded, AttemptStarted, Entry, RankStarted, RunStarted
from runner.journal.ledger import account, attempts_of
from runner.plan.simulate.engine import forecast, simulate
from runner.plan.simulate.scenario import Scenario, learn

BAR_POINTS = 3.0
# The pace of one attempt's steps differs from another's by this much, so that nobody can predict where between two
# checkpoints a kill comes a hundred steps later.
PACE_DEVIATION = 0.03
BEHIND = {
    "replay_points": "difference of the means of all runs",
    "replay_worst_points": "the largest difference of one run",
    "forecast_points": "all runs, by their mean time between failures alone",
}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int  # Runs of the job under random kills.
    epochs: int = 40  # Of the job.
    mttf_s: float = 12.0  # Mean time between kills.
    learning_kills: int = 10  # Kills of the run that the simulation learns from.
    max_kills: float = math.inf  # Kills of each other run.
    draws: int = 200  # Simulations of each run's failures.
    forecasts: int = 400  # Simulations from the mean time between failures.


QUICK = Scale(rounds=1)
SMOKE = Scale(rounds=1, epochs=2, mttf_s=5.0, learning_kills=1, max_kills=1, draws=20, forecasts=20)


def run_under_kills(
    folder: Path, gaps: random.Random, scale: Scale, *, learning: bool = False
) -> tuple[list[Entry], list[float]]:
    """Run the job, and kill its rank 0 after a random time in each attempt.

    Returns:
        The journal, and the seconds from the begin of the run or attempt to each kill.
    """
    settings = [f"trainer.num_train_epochs={scale.epochs}"]
    command = start_command(folder, "--max-restarts", "1000", settings=settings)
    max_kills = scale.learning_kills if learning else scale.max_kills
    kills: list[float] = []
    # As the simulation counts: the first from the run's begin, later ones from the attempt's, after its backoff.
    since, kill_at, pid, number, seen = 0.0, math.inf, 0, 0, 0
    with TrainingRun(command, folder, {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}) as job:
        while job.process.poll() is None:
            entries = job.journal()
            for entry in entries[seen:]:
                match entry.event:
                    case RunStarted():
                        since = entry.time
                    case AttemptStarted():
                        number, pid = number + 1, 0
                        since = since if number == 1 else entry.time
                        kill_at = entry.time + gaps.expovariate(1 / scale.mttf_s)
                        if learning and number == 1:
                            # The duration of a first start is to be learnt, too.
                            kill_at += scale.mttf_s
                        elif number > max_kills:
                            kill_at = math.inf
                    case RankStarted(rank=0):
                        pid = entry.event.pid or 0
                    case AttemptEnded():
                        kill_at = math.inf
            seen = len(entries)
            if pid and time.time() >= kill_at:
                kill_at = math.inf
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append(time.time() - since)
            time.sleep(0.01)
        if job.process.returncode:
            raise SystemExit(f"the job ended with exit code {job.process.returncode}:\n{job.tail(3000)}")
    return job.journal(), kills


def scenario_from(entries: list[Entry], mttf_s: float) -> Scenario:
    """Return the durations of the learning run; the work is its steps, at their own pace."""
    learnt = learn(entries, Scenario(work_s=1.0, mttf_s=mttf_s, hang_share=0.0, node_loss_share=0.0))
    ledger = account(entries)
    steps = next(e.event.total_steps for e in entries if isinstance(e.event, TrainingStarted) and e.event.total_steps)
    computed = sum(attempt.steps for attempt in attempts_of(entries))
    in_steps = ledger.seconds["training"] + ledger.seconds["lost work"]
    return learnt.with_(work_s=in_steps / computed * steps)


def replayed(scenario: Scenario, gaps: list[float], source: random.Random) -> float:
    """Return the goodput of a simulated run with these failures; paces and waits between failures are drawn."""
    paced = [gap * source.gauss(1, PACE_DEVIATION) for gap in gaps]
    return simulate(scenario, source, iter([*paced, float("inf")])).goodput


def table_of(measured: Sequence[float], predicted: Sequence[float], forecast_goodput: float) -> str:
    """Return a Markdown table: each run with its prediction."""
    rows = [(str(n), a, b) for n, (a, b) in enumerate(zip(measured, predicted, strict=True), 1)]
    rows.append(("mean, by MTTF alone", statistics.mean(measured), forecast_goodput))
    return table(
        "run | goodput | simulated | difference, points",
        ((name, f"{100 * a:.1f} %", f"{100 * b:.1f} %", f"{100 * (b - a):+.1f}") for name, a, b in rows),
    )


def main() -> None:
    bench = Benchmark("prediction", __doc__, quick="one round", smoke="one round of a short job, few simulations")
    bench.add_count("--rounds", 4)
    bench.add_seed("of the kills", 1)
    options = bench.parse()
    scale = bench.scale(Scale(options.rounds), QUICK, SMOKE)
    measured, predicted = [], []
    with scratch_folder() as folder:
        entries, _ = run_under_kills(folder / "learn", random.Random(options.seed), scale, learning=True)
        scenario = scenario_from(entries, scale.mttf_s)
        bench.say(f"learnt: {scenario}")
        for number in range(scale.rounds):
            source = random.Random(f"{options.seed}-{number}")
            entries, gaps = run_under_kills(folder / f"run-{number}", source, scale)
            measured.append(account(entries).goodput)
            goodputs = (replayed(scenario, gaps, random.Random(draw)) for draw in range(scale.draws))
            predicted.append(statistics.mean(goodputs))
            bench.say(
                f"round {number + 1}/{scale.rounds}: {len(gaps)} kills, goodput {measured[-1]:.3f}, "
                f"predicted {predicted[-1]:.3f}"
            )
    expected = forecast(scenario, runs=scale.forecasts, seed=options.seed).goodput
    errors = [100 * (a - b) for a, b in zip(predicted, measured, strict=True)]
    figures = {
        "replay_points": abs(statistics.mean(errors)),
        "replay_worst_points": max(map(abs, errors)),
        "forecast_points": abs(100 * (expected - statistics.mean(measured))),
    }
    bars = dict.fromkeys(figures, ("≤", BAR_POINTS))
    bench.publish(
        "Prediction: simulated and measured goodput",
        f"{scale.epochs} epochs, a kill every {scale.mttf_s:g} s on average, {scale.learning_kills} kills to learn "
        f"from, {scale.draws} simulations of each run.",
        figures,
        f"{table_of(measured, predicted, expected)}\n\n{bar_table(figures, bars, BEHIND)}",
    )


if __name__ == "__main__":
    main()
