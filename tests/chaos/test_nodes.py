"""Nodes that come and go at random: a run on one to three machines, whatever happens to them.

CHAOS_MINUTES=45 pytest -s -m soak tests/chaos/test_nodes.py          CHAOS_SEED=7 pytest ... draws the same again
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.test_random import kill
from integration.support import Run, finished_once, loss_curve, shared_folder
from integration.test_elastic import STEPS, script
from machines import Machine, assert_nobody_is_left, outputs
from wire import Cut

MINUTES = float(os.environ.get("CHAOS_MINUTES", "5"))
SEED = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(2**24)))
pytestmark = pytest.mark.soak
# From one event to the next step. A wire may be cut for so long, and nodes that reconnect wait for silence to end.
RECOVERY_LIMIT_S = 120.0
EVENTS = 8


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = shared_folder(tmp_path_factory) / "calm-elastic"
    return finished_once(folder / "run", "--nproc-per-node", "3", script=lambda: script(folder, slow=False))


@pytest.mark.timeout(900 + 180 * MINUTES)
def test_nodes_come_and_go(cut: Cut, calm: Run, tmp_path: Path) -> None:
    print(f"CHAOS_SEED={SEED}")
    dice = random.Random(SEED)
    until, number, events = time.monotonic() + 60 * MINUTES, 0, 0
    while number == 0 or time.monotonic() < until:
        number += 1
        cluster = Cluster(tmp_path / f"run-{number}", dice, cut)
        cluster.run()
        events += len(cluster.told)
        print(f"run {number}:", *cluster.told, sep="\n  ")
        newest = tmp_path / f"run-{number}" / "volume" / f"checkpoint-{STEPS}"
        ours, theirs = loss_curve(newest), loss_curve(calm.checkpoint(STEPS))
        assert [step for step, _ in ours] == [step for step, _ in theirs], cluster.told
        # The samples of each step are those of the undisturbed run; a sum over other ranks is rounded in another way.
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=1e-5), cluster.told
    print(f"{events} events in {number} runs")


class Cluster:
    """Three machines under random events; which one leads may change, too."""

    def __init__(self, folder: Path, dice: random.Random, cut: Cut) -> None:
        self._dice, self._cut, self._folder = dice, cut, folder
        settings = ("launch.grow_interval_s=0", "launch.last_call_s=2", "restart.max_restarts=1000")
        quick = [part for setting in settings for part in ("--set", setting)]
        job = script(folder, slow=True)
        self._machines = [Machine(folder, number, *quick, script=job, nnodes="1:3") for number in (0, 1, 2)]
        self.told: list[str] = []

    def _alive(self) -> list[Machine]:
        return [m for m in self._machines if m.process is not None and m.process.poll() is None]

    def _leader(self) -> Machine | None:
        """Return the machine that has the newest lease, if it runs."""
        leases = sorted((self._folder / "volume" / ".records").glob("lease-*"), key=lambda path: int(path.name[6:]))
        rank = json.loads(leases[-1].read_bytes())["node_rank"] if leases else 0
        return next((machine for machine in self._alive() if machine.number == rank), None)

    def run(self) -> None:
        for machine in self._machines:
            machine.start()
        self._wait_for_a_step()
        while len(self.told) < EVENTS:
            time.sleep(self._dice.uniform(0, 2))
            event: Callable[[], str] = self._dice.choice([
                self._kill_rank, self._kill_helper, self._kill_node, self._kill_leader, self._cut_wire,
                self._preempt_node, self._start_nodes, self._start_nodes, self._stop_all,
            ])  # fmt: skip
            self.told.append(f"{event()}; then step {self._wait_for_a_step()}")
        (self._folder / "hf.fast").touch()
        codes = {machine.number: machine.finish() for machine in self._alive()}
        assert codes and set(codes.values()) == {0}, "\n".join([*self.told, str(codes), outputs(self._machines)])
        assert_nobody_is_left(self._machines)

    # -- events --------------------------------------------------------------------------------------------------

    def _kill_rank(self) -> str:
        return self._kill_one("rank_started", "pid", "rank")

    def _kill_helper(self) -> str:
        key = self._dice.choice(["launcher_pid", "agent_pid"])
        return self._kill_one("attempt_started", key, key.removesuffix("_pid"))

    def _kill_one(self, event: str, key: str, name: str) -> str:
        victim = self._dice.choice(self._alive())
        entries: list[dict[str, Any]] = victim.events(event)
        if not entries:
            return f"machine {victim.number} has no {name} yet"
        return f"machine {victim.number}: {kill(entries[-1][key], name)}"

    def _kill_node(self) -> str:
        victim = self._dice.choice(self._alive())
        return self._kill_machine(victim)

    def _kill_leader(self) -> str:
        victim = self._leader()
        return self._kill_machine(victim) if victim is not None else self._kill_node()

    def _kill_machine(self, victim: Machine) -> str:
        leads = " (leads)" if victim is self._leader() else ""
        os.kill(victim.runner_pid(), signal.SIGKILL)
        victim.finish()
        return f"machine {victim.number}{leads} killed"

    def _cut_wire(self) -> str:
        number, seconds = self._dice.randrange(3), self._dice.uniform(0.2, 15)
        self._cut.now(number)
        time.sleep(seconds)
        self._cut.restore()
        return f"machine {number}: the wire was cut for {seconds:.1f} s"

    def _preempt_node(self) -> str:
        victim = self._dice.choice(self._alive())
        leads = " (leads)" if victim is self._leader() else ""
        victim.signal(signal.SIGTERM)
        code = victim.finish()
        assert code == 75, "\n".join([*self.told, outputs(self._machines)])
        return f"machine {victim.number}{leads} preempted"

    def _start_nodes(self) -> str:
        alive = self._alive()
        absent = [machine for machine in self._machines if machine not in alive]
        if not absent:
            return self._kill_node()
        for machine in absent:
            machine.start()
        return f"machines {[machine.number for machine in absent]} started"

    def _stop_all(self) -> str:
        # As a scheduler does; a node that has not met the leader yet learns of it in no other way.
        alive = self._alive()
        for machine in alive:
            machine.signal(signal.SIGTERM)
        codes = {machine.number: machine.finish() for machine in alive}
        assert set(codes.values()) == {75}, "\n".join([*self.told, str(codes), outputs(self._machines)])
        for machine in self._machines:
            machine.start()
        return "all stopped by SIGTERM, and started again"

    # -- progress ------------------------------------------------------------------------------------------------

    def _wait_for_a_step(self) -> int:
        """Wait for a step that ends after now, and return it; machines that have all ended are started again."""
        now, deadline = time.time(), time.monotonic() + RECOVERY_LIMIT_S
        while True:
            entries = [entry for machine in self._machines for entry in machine.events("log")]
            new = [int(entry["step"]) for entry in entries if entry["time"] > now]
            if new:
                return max(new)
            if not self._alive():
                self._start_nodes()
            for machine in self._machines:
                # A leader that finds itself replaced, and nodes that are stopped with it, are to be started again.
                assert machine.process is None or machine.process.poll() in (None, 75, -signal.SIGKILL), "\n".join(
                    [*self.told, machine.output]
                )
            assert time.monotonic() < deadline, "\n".join(["no step after", *self.told, outputs(self._machines)])
            time.sleep(0.1)
