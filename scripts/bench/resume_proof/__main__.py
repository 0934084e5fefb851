"""What the step record finds, what it costs, and whether it is ever wrong.

Small loops with dropout, noise of numpy and Python, a scheduler, a scaler and a running mean are ended as a crash
would, and resumed with one item left out of what is restored: does the first repeated step show it, named rightly?
Then they are resumed as they should be: is a difference ever reported? At last, the record is timed in a training of
about 50 ms a step.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
from library.benchmark import Benchmark
from library.figures import table
from library.measuring import scratch_folder
from library.methods import Decoder
from resume_proof.job import FAULTS, SAVE_STEPS, compute_history, resume

from checkpointing import CheckpointManager
from checkpointing.proof.recorder import StepRecorder
from runner.system import processes

# Steps of a history, and the one that it is resumed from.
END = 2 * SAVE_STEPS + 3
_RESUMES_OF_A_HISTORY = 18


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    faults: int
    resumes: int
    steps: int = 200
    width: int = 192
    layers: int = 4
    tokens: int = 128


QUICK, SMOKE = Scale(54, 54, 60), Scale(9, 2, 6, 64, 1, 8)


def in_child(call: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a forked process; return when it and all that it has left behind have ended."""
    pid = os.fork()
    if pid == 0:
        try:
            call(*arguments)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    code = -1
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            break
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            end_workers()
    if code != 0:
        raise RuntimeError(f"{call.__name__}{arguments[1:]} ended with {code}")


def end_workers() -> None:
    """End what a loader has left: a worker that began as its process ended takes this one for its parent."""
    for process in processes.descendants():
        with contextlib.suppress(psutil.Error):
            if process.name() == "pt_data_worker":
                process.kill()


@dataclass
class Finding:
    """What became of one resume: what was left out, and what its comparison has said."""

    fault: str | None
    first: int
    last: int
    differs: list[str]

    @property
    def is_found(self) -> bool:
        return bool(self.differs) and self.last < self.first

    @property
    def is_named(self) -> bool:
        return self.is_found and self.fault is not None and self.differs[0] in FAULTS[self.fault][1]


def resumes(bench: Benchmark, folder: Path, faults: list[str | None], seed: int) -> Iterator[Finding]:
    """Resume histories, a few times each, with these left out in turn."""
    for number, fault in enumerate(faults):
        job, history = seed + number // _RESUMES_OF_A_HISTORY, folder / "history"
        if number % _RESUMES_OF_A_HISTORY == 0:
            bench.say(f"{number} of {len(faults)} resumes")
            shutil.rmtree(history, ignore_errors=True)
            in_child(compute_history, history, job, END)
        run, result = folder / "run", folder / f"result-{number}"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(history, run)
        in_child(resume, run, job, END, fault, result)
        events = json.loads(result.read_text())
        if len(events) != 1:
            raise RuntimeError(f"resume {number} of job {job} has reported {events}")
        yield Finding(fault, **events[0])


class Clock:
    """Adds up the time that the record takes in the training thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                began = time.perf_counter()
                try:
                    return call(*arguments, **options)
                finally:
                    self.seconds += time.perf_counter() - began

            return run

        with (
            mock.patch.object(StepRecorder, "batch", timed(StepRecorder.batch)),
            mock.patch.object(StepRecorder, "end", timed(StepRecorder.end)),
        ):
            yield


def cost(scale: Scale, folder: Path) -> tuple[float, float, int]:
    """Return the milliseconds of a step and of its record, medians, and the number of parameters that are sampled."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(scale.width, scale.layers, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (4, scale.tokens))
    manager = CheckpointManager(str(folder), model=model, optimizer=optimizer, snapshot_steps=None)
    clock, steps, records = Clock(), list[float](), list[float]()
    with clock.installed():
        for step in range(manager.resume(), scale.steps):
            clock.seconds, began = 0.0, time.perf_counter()
            loss = model(tokens).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step(step + 1, metrics={"loss": float(loss.detach())})
            if step >= 3:
                steps.append(1000 * (time.perf_counter() - began))
                records.append(1000 * clock.seconds)
        manager.close()
    return statistics.median(steps), statistics.median(records), len(list(model.parameters()))


def main() -> None:
    bench = Benchmark("resume_proof", __doc__, quick="54 faults, 54 resumes", smoke="a fault of each kind")
    bench.add_count("--faults", 504, "resumes with something left out")
    bench.add_count("--resumes", 1000, "resumes as they should be")
    bench.add_seed("of the jobs and of what is left out")
    options = bench.parse()
    scale = bench.scale(Scale(options.faults, options.resumes), QUICK, SMOKE)
    draw, names = random.Random(options.seed), list(FAULTS)
    # Each kind equally often.
    kinds: list[str | None] = [names[number % len(names)] for number in range(scale.faults)]
    draw.shuffle(kinds)
    with scratch_folder() as folder:
        spoiled = list(resumes(bench, folder, kinds, 1000 * options.seed))
        sound = list(resumes(bench, folder, [None] * scale.resumes, 1000 * options.seed + 500))
        step_ms, record_ms, tensors = cost(scale, folder / "cost")
    found, named = (
        sum(values) / len(spoiled) for values in zip(*((f.is_found, f.is_named) for f in spoiled), strict=True)
    )
    alarms = sum(bool(finding.differs) for finding in sound)
    count = collections.Counter(finding.fault for finding in spoiled)
    rows = [
        (
            kind,
            count[kind],
            sum(one.is_found for one in spoiled if one.fault == kind),
            sum(one.is_named for one in spoiled if one.fault == kind),
        )
        for kind in names
    ]
    share = record_ms / step_ms
    figures = {
        "found_at_first_step": found,
        "named_rightly": named,
        "false_alarms": float(alarms),
        "record_ms": record_ms,
        "record_share_of_step": share,
    }
    summary = [
        ("left out, and found at the first repeated step", f"{found:.1%} of {len(spoiled)}", "99 %"),
        ("… and named rightly", f"{named:.1%}", "90 %"),
        ("false alarms", f"{alarms} in {len(sound)} resumes", "0"),
        (f"record of a step of {step_ms:.0f} ms, {tensors} parameters, µs", f"{1000 * record_ms:.0f}", ""),
        ("its share of the step", f"{share:.3%}", "0.1 %"),
    ]
    tables = table("figure | value | bar", summary) + "\n\n" + table("left out | resumes | found | named", rows)
    bench.publish(
        "Resume proof", "single processes.", {name: round(value, 6) for name, value in figures.items()}, tables
    )


if __name__ == "__main__":
    main()
