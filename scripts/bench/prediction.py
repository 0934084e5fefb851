"""Does `runner simulate` predict what happens? The bundled job under random kills, its goodput against the forecast.

    python scripts/bench/prediction.py --rounds 4 --docs

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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Progress, command_line, machine, make_parser, today, write_figures
from training_run import TrainingRun

from checkpointing.agent.events import TrainingStarted
from runner.chaos.run_under_test import runner_command
from runner.journal.events import AttemptEnded, AttemptStarted, Entry, RankStarted, RunStarted
from runner.journal.ledger import account, attempts_of
from runner.plan.simulate.engine import forecast, simulate
from runner.plan.simulate.scenario import Scenario, learn

BAR_POINTS = 3.0
# The pace of one attempt's steps differs from another's by this much, so that nobody can predict where between two
# checkpoints a kill comes a hundred steps later.
PACE_DEVIATION = 0.03
PAGE = "prediction.md"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Runs of the job under random kills.
        epochs: Of the job.
        mttf_s: Mean time between kills.
        learning_kills: Kills of the run that the simulation learns from.
        max_kills: Kills of each other run; None for no limit.
        draws: Simulations of each run's failures.
        forecasts: Simulations from the mean time between failures.
    """

    rounds: int
    epochs: int = 40
    mttf_s: float = 12.0
    learning_kills: int = 10
    max_kills: int | None = None
    draws: int = 200
    forecasts: int = 400


QUICK = Scale(rounds=1)
SMOKE = Scale(rounds=1, epochs=2, mttf_s=5.0, learning_kills=1, max_kills=1, draws=20, forecasts=20)


def run_under_kills(
    folder: Path, gaps: random.Random, scale: Scale, *, learning: bool = False
) -> tuple[list[Entry], list[float]]:
    """Run the job, and kill its rank 0 after a random time in each attempt.

    Args:
        folder: Of the run.
        gaps: Source of the times.
        scale: The job's length, the mean time and the number of kills.
        learning: Whether the simulation learns from this run.

    Returns:
        The journal, and the seconds from the begin of the run or attempt to each kill.
    """
    command = runner_command(folder, "--set", f"trainer.num_train_epochs={scale.epochs}", "--max-restarts", "1000")
    max_kills = scale.learning_kills if learning else scale.max_kills
    kills: list[float] = []
    # As the simulation counts: the first from the run's begin, later ones from the attempt's, after its backoff.
    since, kill_at, pid, number, seen = 0.0, math.inf, 0, 0, 0
    with TrainingRun(command, folder, {"PYTHONPATH": str(ROOT)}) as job:
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
                        elif max_kills is not None and number > max_kills:
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


def table_of(
    measured: Sequence[float], predicted: Sequence[float], forecast_goodput: float, figures: dict[str, float]
) -> str:
    """Return Markdown tables: each run with its prediction, and each figure with its bar."""
    rows = [(str(n), a, b) for n, (a, b) in enumerate(zip(measured, predicted, strict=True), 1)]
    rows.append(("mean, by MTTF alone", statistics.mean(measured), forecast_goodput))
    lines = ["| run | goodput | simulated | difference, points |", "|---|---|---|---|"]
    lines += [f"| {name} | {100 * a:.1f} % | {100 * b:.1f} % | {100 * (b - a):+.1f} |" for name, a, b in rows]
    lines += ["", "| figure | points | bar | |", "|---|---|---|---|"]
    for name, points in figures.items():
        verdict = "PASS" if points <= BAR_POINTS else "MISS"
        lines.append(f"| `{name}` | {points:.2f} | ≤ {BAR_POINTS:g} | {verdict} |")
    return "\n".join(lines)


def page_of(scale: Scale, table: str) -> str:
    return (
        "# Prediction: simulated and measured goodput\n\n"
        f"`{command_line('prediction.py')}`, {today()}, on {machine()}.\n\n"
        f"The bundled job, {scale.epochs} epochs; in each attempt a rank is killed at random, every {scale.mttf_s:g} s "
        f"on average. The durations come from another run of it, with {scale.learning_kills} kills. Simulated: the\n"
        f"failures of this very run, {scale.draws} times, each attempt at a pace of its own "
        f"({100 * PACE_DEVIATION:g} % standard deviation), because\nnobody can predict where between two checkpoints "
        "a kill comes a hundred steps later. Last line: all runs, from\ntheir mean time between failures alone.\n"
        "`replay_points` is the difference of the runs' means, `replay_worst_points` the largest of one run.\n\n"
        f"{table}\n"
    )


def main() -> None:
    parser = make_parser(__doc__, PAGE, quick="one round", smoke="one round of a short job, few simulations")
    parser.add_argument("--rounds", type=int, default=4, help="default: 4")
    parser.add_argument("--seed", type=int, default=1, help="of the kills; default: 1")
    options = parser.parse_args()
    scale = SMOKE if options.smoke else QUICK if options.quick else Scale(options.rounds)
    say = Progress()
    with tempfile.TemporaryDirectory(prefix="prediction-") as name:
        folder = Path(name)
        entries, _ = run_under_kills(folder / "learn", random.Random(options.seed), scale, learning=True)
        scenario = scenario_from(entries, scale.mttf_s)
        say(f"learnt: {scenario}")
        measured, predicted = [], []
        for number in range(scale.rounds):
            source = random.Random(f"{options.seed}-{number}")
            entries, gaps = run_under_kills(folder / f"run-{number}", source, scale)
            measured.append(account(entries).goodput)
            goodputs = (replayed(scenario, gaps, random.Random(draw)) for draw in range(scale.draws))
            predicted.append(statistics.mean(goodputs))
            say(
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
    table = table_of(measured, predicted, expected, figures)
    print(f"\n{table}")
    write_figures(options.json, figures)
    if options.docs:
        (options.docs / PAGE).write_text(page_of(scale, table))


if __name__ == "__main__":
    main()
