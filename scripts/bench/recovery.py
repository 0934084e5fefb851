"""What a failure costs: back from a killed rank, never hung, nothing left behind, and what supervision costs meanwhile.

The bundled job (2 ranks, gloo, one thread each, no GPU) under `runner start`, and the same model, data and batches in a
plain `SFTTrainer` script under what others restart it with; all take turns within each round. `ft_launcher` (NVIDIA's
nvidia-resiliency-ext) runs without GPUs too, its health checks off; 0.4.1 is its newest wheel for Python 3.11 and glibc
before 2.39. It is installed into `.bench/` on first use, beside the torch that is here; where that fails, it is left
out and the reason is printed. See `docs/benchmarks/recovery.md` for the last result.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import psutil
from common import ROOT, machine, spread, undisturbed

from checkpointing.errors import CheckpointError
from checkpointing.events import Committed, Event, Log, StepEvent
from checkpointing.tiers import open_tiers
from runner.chaos.run_under_test import SETTLE_S, START_TIMEOUT_S, NeverStarted, RunUnderTest, runner_command
from runner.journal.events import AttemptEnded, AttemptStarted, Backoff, RankStarted, RunStarted
from runner.system import processes

HERE = Path(__file__).parent
FT_FOLDER = ROOT / ".bench" / "ft"
FT_PACKAGES = ["nvidia-resiliency-ext==0.4.1", "nvidia-ml-py==13.615.71", "defusedxml==0.7.1"]
FT_MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

METHODS = {
    "ours": "`runner start`",
    "loop": "bash loop around `torchrun`",
    "torchrun": "`torchrun --max-restarts=3`, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    "as_is": "`torchrun --max-restarts=3`, as it is",
    "ft": "`ft_launcher --max-restarts=3`",
}
# The trainings' own environment: no GPU, one thread for each rank.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# Not part of a figure: only every third round.
FOR_INFORMATION = ("as_is", "ft")
# Long enough that no kill falls behind its end; every step is reported, by ours and theirs.
JOB = ("trainer.logging_steps=1", "trainer.num_train_epochs=60")
SAVE_STEPS = 20
NUM_RANKS = 2
# Whoever has not finished a step this long after a kill hangs.
RECOVERY_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
KILLS_PER_RUN = 20
MOMENTS = ("start-up", "restore", "step", "save")
VICTIMS = ("rank 0", "rank 1", "launcher", "agent")
BLOCK_LIMIT_S = 60.0

BARS = {
    "recovery_median_s": 3.0,
    "recovery_vs_loop": 1 / 6,
    "recovery_vs_torchrun": 0.3,
    "hangs": 0,
    "orphans": 0,
    "step_overhead": 1.005,
    "preempt_s": 2.0,  # and the commit
}


@dataclass
class Measured:
    """All that was measured; seconds, None for what did not come back."""

    recovery_s: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in METHODS})
    preempt_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    num_kills: int = 0
    hangs: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    # What else was not as it must be.
    problems: list[str] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    # Shares of a step, by what takes them.
    overhead: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """When and whom, the same for all methods of a round."""

    step: int
    delay_s: float
    rank: int


class Bench:
    """Runs one training at a time, each in a folder of its own."""

    def __init__(self, scratch: Path, seed: int, ft_site: Path | None) -> None:
        self._scratch, self._ft_site, self._seed = scratch, ft_site, seed
        self._random = random.Random(seed)
        self._began = time.monotonic()
        self.measured = Measured()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", file=sys.stderr, flush=True)

    @property
    def methods(self) -> list[str]:
        return [name for name in METHODS if name != "ft" or self._ft_site is not None]

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        # A short name: sockets lie in it, and their paths may have 107 bytes.
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder / "r"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def training(self, method: str) -> Iterator[RunUnderTest]:
        """A training of the default job under a method."""
        with self.folder() as folder:
            script = [str(HERE / "recovery_peer.py"), str(folder), *JOB]
            launch = ["--standalone", "--nproc-per-node", "2"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *launch]
            environment = ENVIRONMENT
            match method:
                case "ours":
                    command = ours(folder, *JOB)
                case "loop":
                    command = ["bash", "-c", 'until "$@"; do :; done', "loop", *torchrun, *script]
                case "torchrun" | "as_is":
                    command = [*torchrun, "--max-restarts", "3", *script]
                    environment = ENVIRONMENT | (SHARED_STORE_OFF if method == "torchrun" else {})
                case _:
                    command = [sys.executable, "-m", FT_MODULE, *launch, "--max-restarts", "3"]
                    command += ["--ignore-missing-fault-tol-cfg", *script]
                    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{self._ft_site}"}
            with RunUnderTest(command, folder, environment) as training:
                yield training

    # -- a killed rank, a preemption -----------------------------------------------------------------------------

    def draw(self) -> Kill:
        """Between two saves, so that no peer is left with half a checkpoint that its script would choke on."""
        return Kill(self._random.randrange(25, 36), self._random.uniform(0, 0.1), self._random.randrange(2))

    def recovery(self, method: str, kill: Kill) -> float | None:
        """Seconds from a rank's SIGKILL to the next step that the new process group finishes; None: it hung.

        Ours is preempted thereafter, which measures that.
        """
        with self.training(method) as training:
            before = training.wait_for_step(kill.step)
            time.sleep(kill.delay_s)
            victim = training.rank(kill.rank)
            assert victim is not None, f"{method}: rank {kill.rank} is gone"
            killed_at = time.time()
            victim.kill()

            def next_step() -> tuple[float, int] | None:
                for entry in training.entries:
                    event = entry.event
                    if isinstance(event, Log) and entry.time > killed_at and entry.attempt != before.attempt:
                        return entry.time, event.step
                return None

            found = training.wait(next_step, RECOVERY_LIMIT_S)
            if found is not None and method == "ours":
                self.preempt(training, before.attempt, found[1] + self._random.randrange(5, 20))
            if found is None and method not in FOR_INFORMATION:
                self.say(f"{METHODS[method]} did not come back; it said:\n{training.tail(1000)}")
        return found[0] - killed_at if found is not None else None

    def preempt(self, training: RunUnderTest, crashed: int, step: int) -> None:
        """SIGTERM to the supervisor in mid-training; checks its exit code, and that the last step is committed.

        Args:
            crashed: the attempt before: its last step may have been higher.
            step: to wait for.
        """
        training.wait_for_step(step, after=crashed)
        time.sleep(self._random.uniform(0, 0.1))
        code, seconds = training.stop(STOP_LIMIT_S)
        steps = [event.step for event in training.all(Log, after=crashed)]
        last = max([*steps, *(event.step for event in training.all(AttemptEnded, after=crashed))])
        committed: int | None = None
        with contextlib.suppress(CheckpointError, IndexError, OSError):
            catalog = open_tiers(str(training.folder / "checkpoints"), None).catalog
            newest = catalog.committed_steps()[-1]
            catalog.verify(newest)
            committed = newest
        if code != 75 or committed != last:
            self.problem(f"preempted: exit code {code}, step {last}, newest whole checkpoint {committed}", training)
            seconds = max(seconds, STOP_LIMIT_S)
        commits = [event.duration_s or 0.0 for event in training.all(Committed) if event.step == committed]
        self.measured.preempt_s.append(seconds)
        self.measured.commit_s += commits[-1:]
        self.check_leftovers(training)

    def problem(self, text: str, training: RunUnderTest) -> None:
        self.measured.problems.append(text)
        self.say(f"WRONG: {text}; it said:\n{training.tail(1000)}")

    def check_leftovers(self, training: RunUnderTest) -> None:
        for left in training.leftovers():
            self.measured.orphans.append(left)
            self.say(f"LEFT: {left}")

    def recoveries(self, rounds: int, *, tries: int) -> None:
        """All methods, in turns; those for information every third time."""
        for number in range(rounds):
            kill = self.draw()
            methods = [name for name in self.methods if name not in FOR_INFORMATION or number % 3 == 0]
            for method in self._random.sample(methods, len(methods)):
                run = functools.partial(self.recovery, method, kill)
                again = 1 if method in FOR_INFORMATION else tries
                try:
                    seconds = undisturbed(run, METHODS[method], tries=again, say=self.say)
                except NeverStarted as error:
                    if method not in FOR_INFORMATION:
                        raise
                    self.say(f"left out: {error}")
                    continue
                self.measured.recovery_s[method].append(seconds)
                text = "hangs" if seconds is None else f"{seconds:.2f} s"
                if method == "ours" and self.measured.preempt_s:
                    text += f", SIGTERM → exit {self.measured.preempt_s[-1]:.2f} s"
                self.say(f"round {number + 1}/{rounds}, {METHODS[method]}: {text}")

    # -- kills at any moment -------------------------------------------------------------------------------------

    def kills(self, num_kills: int) -> None:
        """Runs of ours that are killed at random moments, then stopped in order."""
        plan = random.Random(self._seed + 1)
        run = 0
        while self.measured.num_kills < num_kills:
            run += 1
            self.kill_run(plan, min(KILLS_PER_RUN, num_kills - self.measured.num_kills), f"run {run}")
            self.say(
                f"{self.measured.num_kills}/{num_kills} kills: {len(self.measured.hangs)} hangs, "
                f"{len(self.measured.orphans)} processes left"
            )

    def kill_run(self, plan: random.Random, num_kills: int, name: str) -> None:
        """One run; a hang ends it."""
        with self.folder() as folder:
            command = ours(folder, *JOB, "restart.max_restarts=100000")
            with RunUnderTest(command, folder, ENVIRONMENT) as training:
                victims = Victims(training, plan)
                last = "the start"
                for number in range(num_kills):
                    # The first may fall into the imports; later ones do where the launcher was killed.
                    moment = plan.choice(("import", *MOMENTS) if number == 0 else MOMENTS)
                    if not victims.wait_for(moment):
                        self.hang(f"{name}: did not come to the next moment ({moment}) after {last}", training)
                        return
                    victim = victims.kill()
                    if victim is None:
                        self.hang(f"{name}: nobody to kill ({moment}) after {last}", training)
                        return
                    attempt = f"attempt {victims.killed_in}"
                    last = f"the kill of {victim} ({moment}, {attempt}, step {victims.step})"
                    self.measured.num_kills += 1
                    for key in (moment, victim):
                        self.measured.kills[key] = self.measured.kills.get(key, 0) + 1
                if victims.wait_for_event(Log) is None:
                    self.hang(f"{name}: no step after {last}", training)
                    return
                code, _ = training.stop(STOP_LIMIT_S)
                if code is None:
                    self.hang(f"{name}: no end after SIGTERM, after {last}", training)
                    return
                if code != 75:
                    self.problem(f"{name}: stopped in order, but its exit code is {code}", training)
                self.check_leftovers(training)

    def hang(self, text: str, training: RunUnderTest) -> None:
        """No progress: it waits for ever, or it has given up, which is as bad."""
        code = training.process.poll()
        text += f"; the supervisor {'lives' if code is None else f'has ended with {code}'}"
        self.measured.hangs.append(text)
        self.say(
            f"HANG: {text}\n{training.tail(1000)}\n"
            + "\n".join(json.dumps(entry.to_dict()) for entry in training.entries[-8:])
        )
        if code is not None:
            self.check_leftovers(training)

    # -- what supervision costs ----------------------------------------------------------------------------------

    def overhead(self, num_pairs: int) -> None:
        """Pairs of seconds of a step, with and without supervision."""
        with self.folder() as folder:
            output = folder.parent / "pairs.jsonl"
            script = [str(HERE / "recovery_steps.py"), str(output), str(num_pairs), str(self._seed)]
            with RunUnderTest(ours(folder, script=script), folder, ENVIRONMENT) as training:

                def lines() -> list[str]:
                    return output.read_text().splitlines() if output.exists() else []

                done = 0
                while done < num_pairs:
                    target = min(done + 50, num_pairs)
                    reached = functools.partial(lambda target: len(lines()) >= target or None, target)
                    limit = BLOCK_LIMIT_S * 3 + (START_TIMEOUT_S if done == 0 else 0)
                    if training.wait(reached, limit) is None:
                        raise SystemExit(f"the pairs of blocks stand still at {len(lines())}:\n{training.tail(3000)}")
                    done = target
                    self.say(f"{done}/{num_pairs} pairs of blocks with and without supervision")
                training.wait(lambda: None, STOP_LIMIT_S)
                if training.process.poll() != 0:
                    self.problem(f"the pairs of blocks ended with {training.process.poll()}", training)
                self.check_leftovers(training)
                *pairs, account = [json.loads(line) for line in lines()]
        self.measured.pairs = [(pair["supervised"], pair["plain"]) for pair in pairs]
        cores = min(os.cpu_count() or 1, NUM_RANKS)
        step_s = statistics.median(plain for _, plain in self.measured.pairs)
        self.measured.overhead = {
            "callbacks": account["callbacks_s"] / step_s,
            "the agreement's threads": account["threads_s"] / step_s,
            "other processes": account["others_cpu_s"] / account["wall_s"] / cores,
        }


def ours(folder: Path, *settings: str, script: Sequence[str] = ()) -> list[str]:
    """`runner start` with two ranks."""
    options = [part for setting in settings for part in ("--set", setting)]
    return runner_command(folder, "--nproc-per-node", str(NUM_RANKS), *options, script=script)


class Victims:
    """Waits for moments of a run of ours, and kills somebody in them."""

    def __init__(self, training: RunUnderTest, plan: random.Random) -> None:
        self._training, self._plan = training, plan
        self.killed_in = 0
        self._killed_at = time.time()

    def _limit_s(self) -> float:
        """For whatever comes after a kill: the start's imports, or the wait before a restart, come on top."""
        newer = (entry.event for entry in self._training.entries if entry.time > self._killed_at)
        waits = sum(event.delay_s for event in newer if isinstance(event, Backoff))
        return (RECOVERY_LIMIT_S if self.killed_in else START_TIMEOUT_S) + waits

    def wait_for_event(self, kind: type[Event], remainder: int | None = None) -> Event | None:
        """The next event of an attempt that is newer than the one that was killed."""

        def fits(event: Event) -> bool:
            return remainder is None or (isinstance(event, StepEvent) and event.step % SAVE_STEPS == remainder)

        def found() -> Event | None:
            return next(filter(fits, self._training.all(kind, after=self.killed_in)), None)

        return self._training.wait(found, self._limit_s)

    def wait_for(self, moment: str) -> bool:
        """Until that moment of the next attempt; False: it did not come."""
        match moment:
            case "import":
                came = bool(self._training.wait(lambda: self._training.all(RunStarted) or None, START_TIMEOUT_S))
                delay_s = 8.0
            case "start-up":  # the wait before the restart, the fork or the imports, the rendezvous
                kind = AttemptEnded if self.killed_in else RunStarted

                def ended() -> bool | None:
                    return bool(self._training.all(kind, after=self.killed_in - 1)) or None

                came = bool(self._training.wait(ended, self._limit_s))
                delay_s = 4.0
            case "restore":
                came, delay_s = bool(self.wait_for_event(RankStarted)), 1.5
            case "step":
                came, delay_s = bool(self.wait_for_event(Log)), 2.0
            case _:  # a save follows the step
                came, delay_s = bool(self.wait_for_event(Log, SAVE_STEPS - 1)), 0.2
        if not came:
            return False
        time.sleep(self._plan.uniform(0, delay_s))
        return True

    def kill(self) -> str | None:
        """Kill one of those that live, at random; its name, None if there is nobody."""
        order = self._plan.sample(VICTIMS, len(VICTIMS))
        victim = self._training.wait(lambda: next(filter(None, map(self._find, order)), None), RECOVERY_LIMIT_S)
        if victim is None:
            return None
        name, process = victim
        started = (entry.attempt for entry in self._training.entries if isinstance(entry.event, AttemptStarted))
        self.killed_in = max(started, default=0)
        self._killed_at = time.time()
        with contextlib.suppress(psutil.Error):
            process.kill()
        return name

    def _find(self, name: str) -> tuple[str, psutil.Process] | None:
        match name:
            case "launcher":
                process = self._training.helper("runner.node.launcher")
            case "agent":
                process = self._training.helper("checkpointing.agent")
            case _:
                process = self._training.rank(int(name.removeprefix("rank ")))
        return (name, process) if process is not None else None

    @property
    def step(self) -> int:
        logs = self._training.all(Log)
        return logs[-1].step if logs else 0


# -- results -----------------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    draws = numpy.random.default_rng(seed).choice(numpy.asarray(values), size=(4000, len(values)))
    low, high = numpy.quantile(numpy.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def _ratio(measured: Measured, peer: str) -> float:
    """Median over the rounds of ours / the peer's; one that hung counts with the time that it was given."""
    ours, theirs = ([RECOVERY_LIMIT_S if s is None else s for s in measured.recovery_s[n]] for n in ("ours", peer))
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def figures_of(measured: Measured) -> dict[str, float]:
    """The figures that this project holds itself to."""
    hung = [
        f"no step after a rank's SIGKILL (round {n + 1})"
        for n, s in enumerate(measured.recovery_s["ours"])
        if s is None
    ]
    return {
        "recovery_median_s": statistics.median(
            RECOVERY_LIMIT_S if seconds is None else seconds for seconds in measured.recovery_s["ours"]
        ),
        "recovery_vs_loop": _ratio(measured, "loop"),
        "recovery_vs_torchrun": _ratio(measured, "torchrun"),
        "hangs": len(measured.hangs) + len(hung),
        "orphans": len(measured.orphans),
        "step_overhead": 1 + sum(measured.overhead.values()),
        "preempt_s": statistics.median(measured.preempt_s or [STOP_LIMIT_S]),
    }


def table_of(measured: Measured, figures: Mapping[str, float], seed: int) -> str:
    """Markdown, one row per figure with its bar and what is behind it; then one per method."""
    ratios = [supervised / plain for supervised, plain in measured.pairs]
    low, high = median_interval(ratios, seed)
    commit_s = statistics.median(measured.commit_s or [0.0])
    kills = ", ".join(
        f"{name} {measured.kills[name]}" for name in ("import", *MOMENTS, *VICTIMS) if name in measured.kills
    )
    behind = {
        "recovery_median_s": f"quartiles {spread([s for s in measured.recovery_s['ours'] if s is not None])}",
        "recovery_vs_loop": "median of the rounds' ratios",
        "recovery_vs_torchrun": "median of the rounds' ratios",
        "hangs": f"{measured.num_kills} kills: {kills}",
        "orphans": "after every run of ours",
        "step_overhead": ", ".join(f"{name} {share:.2%}" for name, share in measured.overhead.items())
        + f" of {spread([plain for _, plain in measured.pairs], 3)} s; {len(ratios)} pairs with and without: 95 % "
        f"interval {low:.4f}…{high:.4f}",
        "preempt_s": f"{spread(measured.preempt_s)}; the commit {spread(measured.commit_s, 3)}",
    }
    bars = {**BARS, "preempt_s": BARS["preempt_s"] + commit_s}
    lines = ["| figure | measured | bar | | behind it: median (quartiles) |", "|---|---|---|---|---|"]
    for name, value in figures.items():
        verdict = "PASS" if value <= bars[name] else "MISS"
        lines.append(f"| `{name}` | {value:.4g} | ≤ {bars[name]:.4g} | {verdict} | {behind[name]} |")
    lines += ["", "| restarted by | SIGKILL of a rank → next finished step, s | not back |", "|---|---|---|"]
    for method, title in METHODS.items():
        trials = measured.recovery_s[method]
        back = [seconds for seconds in trials if seconds is not None]
        if trials:
            lines.append(f"| {title} | {spread(back)} | {len(trials) - len(back)} of {len(trials)} |")
    return "\n".join(lines)


METHOD = f"""\
**Recovery**: the bundled job, 2 ranks on gloo, one thread each, in a new folder each time. In the middle of training
(step 25 to 36, between two saves; the same step and rank for all methods of a round) a rank gets SIGKILL. The time
runs until the first finished step of the next process group. The runner's journal records each step
(`trainer.logging_steps=1`); the peers' script records it at the same place in the Trainer's loop. The peers train the
same model on the same data with the same options, by a plain `SFTTrainer` script that resumes from
`get_last_checkpoint`; it keeps its tokenised data, as the runner does. The loop is `until torchrun …; do :; done`,
without a pause; the runner makes its default pause. A method that has not come back after {RECOVERY_LIMIT_S:.0f} s
counts as hanging, with that time. `torchrun --max-restarts` in its default configuration and `ft_launcher`
({FT_PACKAGES[0]}) take part in every third round, for information. If more than a tenth of the processor time went to
other virtual machines, a recovery is repeated, once at most.

**Kills**: runs with default settings, except for `restart.max_restarts`. SIGKILL to rank 0, rank 1, the launcher or
the agent, at random: during imports, between two attempts, during a restore, between two saves, around a save. After
each, the next attempt must reach the moment of the next kill, and the last one a finished step, within
{RECOVERY_LIMIT_S:.0f} s plus the pause that the journal records. Then the run is stopped by SIGTERM. A process that
is alive {SETTLE_S:.0f} s after a run's end is an orphan. Orphans are found by a mark in their environment, by the
run's id, and by descent (the benchmark is a subreaper).

**Overhead**: the bundled job's training in one run, in alternating blocks of 5 steps on the same batches, without the
first step of each block. In one block of each pair, in random order, heartbeats, flag exchange and reports are left
out. Steps of one job differ by a tenth for reasons of the machine, so the pairs' ratios say no more than the interval
given. The figure is the sum of all that supervision does, each part measured and counted as if nothing else ran
meanwhile: the time that the callbacks take of a step, in the slowest rank and including what interrupts them; the
processor time of the flag exchange's own threads; and the processor time of all other processes of the run
(supervisor, agent, launcher), as a share of the ranks' cores. Snapshots and commits are off:
`docs/benchmarks/checkpoint.md` has their cost.

**Preemption**: in the same runs as the recovery, some steps after it. From SIGTERM to `runner start` until it has
ended, with exit code 75 and the last finished step committed, all digests compared.
"""


def ft_site() -> Path | None:
    """Where `ft_launcher` can be imported from, beside the torch that is here; None, with the reason, if it cannot."""
    if not (FT_FOLDER / "ready").exists():
        print(f"first use: installing {FT_PACKAGES[0]} into {FT_FOLDER.relative_to(ROOT)}", file=sys.stderr)
        shutil.rmtree(FT_FOLDER, ignore_errors=True)
        # Without its dependencies: torch is here, and everything else but these two.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FT_FOLDER)]
        result = subprocess.run([*install, *FT_PACKAGES], capture_output=True, text=True, timeout=600)
        if result.returncode != 0:
            print(f"ft_launcher is left out, it cannot be installed: {result.stderr[-500:]}", file=sys.stderr)
            return None
        (FT_FOLDER / "ready").touch()
    environment = {**os.environ, "PYTHONPATH": str(FT_FOLDER)}
    result = subprocess.run(
        [sys.executable, "-c", f"import {FT_MODULE}"], capture_output=True, text=True, env=environment, timeout=120
    )
    if result.returncode != 0:
        print(f"ft_launcher is left out, it cannot be imported: {result.stderr[-500:]}", file=sys.stderr)
        return None
    return FT_FOLDER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds, 10 kills, 150 pairs, nothing repeated")
    parser.add_argument("--rounds", type=int, default=7, help="of recovery and preemption; default: 7")
    parser.add_argument("--kills", type=int, default=100, help="at random moments; default: 100")
    parser.add_argument("--pairs", type=int, default=300, help="of blocks with and without supervision; default: 300")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks/recovery.md")
    parser.add_argument("--scratch", type=Path, help="folder for the runs; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="of moments, victims and orders; default: 0")
    options = parser.parse_args()
    rounds, kills, pairs = (2, 10, 150) if options.quick else (options.rounds, options.kills, options.pairs)
    if min(rounds, kills, pairs) < 1:
        parser.error("--rounds, --kills and --pairs must be at least 1")

    # The trainings are in sessions of their own: whatever ends us must end them.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    processes.become_subreaper()
    scratch = Path(tempfile.mkdtemp(prefix="rb-", dir=options.scratch))
    bench = Bench(scratch, options.seed, ft_site())
    try:
        bench.recoveries(rounds, tries=1 if options.quick else 2)
        bench.overhead(pairs)
        bench.kills(kills)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    measured = bench.measured
    figures = figures_of(measured)
    table = table_of(measured, figures, options.seed)
    print(f"\n{table}")
    for what, texts in {"hang": measured.hangs, "left over": measured.orphans, "wrong": measured.problems}.items():
        for text in texts:
            print(f"{what}: {text}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.docs:
        command = " ".join(["python", "scripts/bench/recovery.py", *sys.argv[1:]])
        text = (
            "# Recovery: what a failure costs\n\n"
            f"`{command}`, {datetime.date.today()}, on {machine()}; {rounds} rounds, "
            f"{kills} kills, {pairs} pairs of blocks.\n\n{table}\n\n{METHOD}"
        )
        (ROOT / "docs" / "benchmarks" / "recovery.md").write_text(text)
    if measured.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
