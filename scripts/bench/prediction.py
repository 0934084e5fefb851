"""Does `runner simulate` foretell what happens? The bundled job under random kills, its goodput against the forecast.

    python scripts/bench/prediction.py --rounds 4 --docs

One run with a few kills teaches the simulation how long things take here (`--from`). Then the job runs again and again,
with kills at times of an exponential distribution that is redrawn for each run. Compared are a run's goodput, by its
ledger, with the simulation of the very failures that struck it, and the mean of all runs with the forecast, which knows
the mean time between failures alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, machine

from checkpointing.events import TrainingStarted
from runner.chaos.run_under_test import RunUnderTest, runner_command
from runner.journal.events import AttemptEnded, AttemptStarted, Entry, RankStarted, RunStarted
from runner.journal.ledger import account, attempts_of
from runner.simulate.engine import forecast, simulate
from runner.simulate.scenario import Scenario, learn

BAR_POINTS = 3.0
_EPOCHS, _MTTF_S, _LEARNING_KILLS = 40, 12.0, 10
_DRAWS = 200
# By which the pace of one attempt's steps differs from another's, so that where between two checkpoints a kill falls, a
# hundred steps later, is nobody's to foretell.
_PACE_DEVIATION = 0.03
DOCS = ROOT / "docs" / "benchmarks" / "prediction.md"


def run_with_kills(
    folder: Path, gaps: random.Random, mttf_s: float, most: int | None
) -> tuple[list[Entry], list[float]]:
    """Run the job and kill rank 0 after a random time in each attempt; return its journal and those times."""
    command = runner_command(folder, "--set", f"trainer.num_train_epochs={_EPOCHS}", "--max-restarts", "1000")
    killed_after: list[float] = []
    # As the simulation counts: from the run's begin, later ones from the attempt's, behind its backoff.
    since, kill_at, pid, number, seen = 0.0, math.inf, 0, 0, 0
    with RunUnderTest(command, folder, {"PYTHONPATH": str(ROOT)}) as job:
        while job.process.poll() is None:
            job.refresh()
            new, seen = job.entries[seen:], len(job.entries)
            for entry in new:
                match entry.event:
                    case RunStarted():
                        since = entry.time
                    case AttemptStarted():
                        number, pid = number + 1, 0
                        since = since if number == 1 else entry.time
                        kill_at = entry.time + gaps.expovariate(1 / mttf_s)
                        if most is not None and number == 1:
                            # What a first start takes is to be learnt, too.
                            kill_at += _MTTF_S
                        elif most is not None and number > most:
                            kill_at = math.inf
                    case RankStarted(rank=0) as started:
                        pid = started.pid or 0
                    case AttemptEnded():
                        kill_at = math.inf
            if pid and time.time() >= kill_at:
                kill_at = math.inf
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed_after.append(time.time() - since)
            time.sleep(0.01)
        job.refresh()
        if job.process.returncode:
            raise SystemExit(f"the job ended with {job.process.returncode}:\n{job.tail(3000)}")
    return job.entries, killed_after


def scenario_from(events: list[Entry]) -> Scenario:
    """What the learning run tells; the work is its steps, at their own pace."""
    learnt = learn(events, Scenario(work_s=1.0, mttf_s=_MTTF_S, hang_share=0.0, node_loss_share=0.0))
    ledger = account(events)
    steps = next(entry.event.total_steps or 0 for entry in events if isinstance(entry.event, TrainingStarted))
    computed = sum(attempt.steps for attempt in attempts_of(events))
    in_steps = ledger.seconds["training"] + ledger.seconds["lost work"]
    return learnt.with_(work_s=in_steps / computed * steps)


def replayed(scenario: Scenario, gaps: list[float], source: random.Random) -> float:
    """The goodput of a simulated run with these failures; left to chance are paces, and waits between failures."""
    paced = [gap * source.gauss(1, _PACE_DEVIATION) for gap in gaps]
    return simulate(scenario, source, iter([*paced, float("inf")])).goodput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="prediction-") as name:
        folder = Path(name)
        events, _ = run_with_kills(folder / "learn", random.Random(arguments.seed), _MTTF_S, _LEARNING_KILLS)
        scenario = scenario_from(events)
        print(f"learnt: {scenario}")
        measured, foretold = [], []
        for number in range(rounds):
            source = random.Random(f"{arguments.seed}-{number}")
            events, gaps = run_with_kills(folder / f"run-{number}", source, _MTTF_S, None)
            measured.append(account(events).goodput)
            foretold.append(statistics.mean(replayed(scenario, gaps, random.Random(draw)) for draw in range(_DRAWS)))
            print(f"round {number + 1}: {len(gaps)} kills, goodput {measured[-1]:.3f}, foretold {foretold[-1]:.3f}")
    seen = forecast(scenario, runs=400, seed=arguments.seed)
    off = [100 * (a - b) for a, b in zip(foretold, measured, strict=True)]
    mean = statistics.mean(measured)
    figures = {
        "replay_points": abs(statistics.mean(off)),
        "replay_worst_points": max(map(abs, off)),
        "forecast_points": abs(100 * (seen.goodput - mean)),
    }
    rows = [(str(n), a, b) for n, (a, b) in enumerate(zip(measured, foretold, strict=True), 1)]
    rows.append(("mean, by MTTF alone", mean, seen.goodput))
    lines = ["| run | goodput | simulated | difference, points |", "|---|---|---|---|"]
    lines += [f"| {name} | {100 * a:.1f} % | {100 * b:.1f} % | {100 * (b - a):+.1f} |" for name, a, b in rows]
    lines += ["", "| figure | points | bar | |", "|---|---|---|---|"]
    for name, points in figures.items():
        verdict = "PASS" if points <= BAR_POINTS else "MISS"
        lines.append(f"| `{name}` | {points:.2f} | ≤ {BAR_POINTS:g} | {verdict} |")
    print("\n".join(lines))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.docs:
        command = " ".join(["python scripts/bench/prediction.py", *sys.argv[1:]])
        title = "# Prediction: simulated and measured goodput"
        head = f"{title}\n\n`{command}`, {time.strftime('%Y-%m-%d')}, on {machine()}.\n"
        method = (
            f"The bundled job, {_EPOCHS} epochs. A random rank is killed in each attempt, every {_MTTF_S:g} s on "
            "average. Durations come from\nanother run of it, with ten kills. Simulated: the failures of this very "
            f"run, {_DRAWS} times, each attempt at its own pace\n({100 * _PACE_DEVIATION:g} % standard deviation), "
            "because it cannot be predicted where between two checkpoints a kill falls a hundred\nsteps later. Last "
            "line: all runs, by their mean time between failures alone.\n\n"
            "`replay_points` is the difference of the runs' means, `replay_worst_points` the largest of one run.\n"
        )
        DOCS.write_text("\n".join([head, method, *lines]) + "\n")


if __name__ == "__main__":
    main()
