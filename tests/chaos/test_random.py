"""Random faults: each run draws and prints a new seed; variables set the seed and a longer duration.

CHAOS_MINUTES=45 pytest -s -m soak tests/chaos/test_random.py          CHAOS_SEED=7 pytest ... draws the same again
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from chaos.test_campaign import chaos
from helpers.machines import (
    END,
    Machine,
    assert_nobody_is_left,
    finish,
    outputs,
    pair,
    start,
)
from helpers.wire import Cut
from integration.support import Run, finished_once, shared_folder, state_hash, troubled

MINUTES = float(os.environ.get("CHAOS_MINUTES", "5"))
pytestmark = pytest.mark.soak
SEED = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(2**24)))
# Long enough for several faults.
SLOW = """
def at_step(step, args):
    time.sleep(0.2)
"""
RECOVERY_LIMIT_S = 120.0


@pytest.mark.timeout(600 + 120 * MINUTES)
def test_on_one_machine(tmp_path: Path) -> None:
    print(f"CHAOS_SEED={SEED}")
    code, verdict, output = chaos(tmp_path, "--kills", "2", "--minutes", str(MINUTES), "--seed", str(SEED))
    assert code == 0, output
    print(output[-3000:])
    assert verdict["faults"] >= 2 and verdict["violations"] == 0 and verdict["identical"]
    assert "bit-identical to the fault-free run" in output.splitlines()[-1]
    assert not list((tmp_path / "chaos").glob("run-*")), "folders of runs that ended well are removed"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks on one machine, undisturbed."""
    folder = shared_folder(tmp_path_factory) / "calm"
    return finished_once(folder / "run", script=lambda: troubled(folder))


@pytest.mark.timeout(600 + 120 * MINUTES)
def test_on_two_machines(cut: Cut, calm: Run, tmp_path: Path) -> None:
    print(f"CHAOS_SEED={SEED}")
    dice = random.Random(SEED)
    until, number = time.monotonic() + 60 * MINUTES, 0
    while number == 0 or time.monotonic() < until:
        number += 1
        told = one_run(cut, tmp_path / f"run-{number}", dice, until)
        print(f"run {number}:", *told, sep="\n  ")
        newest = tmp_path / f"run-{number}" / "volume" / f"checkpoint-{END}"
        assert state_hash(newest) == state_hash(calm.checkpoint(END)), told


def one_run(cut: Cut, folder: Path, dice: random.Random, until: float) -> list[str]:
    """Run until at least three faults were injected and the run has finished; return the faults."""
    told: list[str] = []
    machines = pair(folder, "--set", "restart.max_restarts=1000", trouble=SLOW)
    start(machines)
    steps = new_step(machines, 0)
    while steps and (len(told) < 3 or time.monotonic() < until):
        time.sleep(dice.uniform(0, 1.5))
        victim = dice.choice(machines)
        fault = dice.choice([kill_rank, kill_helper, kill_runner, cut_wire, stop_in_good_order])
        what = fault(machines, victim, dice, cut)
        told.append(f"step {max(logged(machines))}: machine {victim.number}: {what}")
        steps = new_step(machines, steps, told)
    assert finish(machines) == [0, 0], "\n".join([*told, outputs(machines)])
    assert_nobody_is_left(machines)
    return told


def kill_rank(machines: list[Machine], victim: Machine, dice: random.Random, cut: Cut) -> str:
    return kill(victim.rank_pid(victim.number), "rank")


def kill_helper(machines: list[Machine], victim: Machine, dice: random.Random, cut: Cut) -> str:
    if dice.random() < 0.5:
        return kill(victim.launcher_pid(), "launcher")
    return kill(victim.agent_pid(), "agent")


def kill_runner(machines: list[Machine], victim: Machine, dice: random.Random, cut: Cut) -> str:
    what = kill(victim.runner_pid(), "runner")
    victim.finish()
    if victim.process is not None and victim.process.returncode != 0:
        time.sleep(dice.uniform(0, 5))
        victim.start()
    return f"{what}, and started again"


def cut_wire(machines: list[Machine], victim: Machine, dice: random.Random, cut: Cut) -> str:
    seconds = dice.uniform(0.2, 15)
    cut.now()
    time.sleep(seconds)
    cut.restore()
    return f"the wire was cut for {seconds:.1f} s"


def stop_in_good_order(machines: list[Machine], victim: Machine, dice: random.Random, cut: Cut) -> str:
    victim.signal(signal.SIGTERM)
    codes = finish(machines)
    assert set(codes) <= {0, 75}, outputs(machines)
    if codes != [0, 0]:
        start(machines)
    return f"SIGTERM: {codes}"


def kill(pid: int, name: str) -> str:
    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        return f"{name} had gone"
    return f"{name} killed"


def logged(machines: list[Machine]) -> list[int]:
    """Return the step of each log entry so far."""
    return [0, *(int(str(event["step"])) for event in machines[0].events("log"))]


def new_step(machines: list[Machine], before: int, told: list[str] | None = None) -> int:
    """Wait for one more log entry than `before`; their number then, 0 once a machine's runner has ended."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while len(logged(machines)) - 1 <= before:
        if any(machine.process is None or machine.process.poll() is not None for machine in machines):
            return 0
        assert time.monotonic() < deadline, f"no step after {told}"
        time.sleep(0.05)
    return len(logged(machines)) - 1
