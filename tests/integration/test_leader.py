"""A leader that is lost for good, or preempted, is replaced by a node that holds the state; all others follow it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from integration.support import finished_once, loss_curve, shared_folder, wait_until
from integration.test_elastic import STEPS, script
from machines import Machine, assert_nobody_is_left, outputs


def next_leader(machines: list[Machine]) -> Machine:
    """Wait until one of them leads."""

    def found() -> list[Machine]:
        return [machine for machine in machines if machine.events("leader_changed")]

    wait_until(machines[0], lambda: bool(found()))
    (leader,) = found()
    return leader


def test_a_leader_that_is_lost_for_good_is_replaced(
    wire: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shared_folder(tmp_path_factory) / "calm-elastic"
    calm = finished_once(folder / "run", "--nproc-per-node", "3", script=lambda: script(folder, slow=False))
    quick = ("--set", "launch.grow_interval_s=0", "--set", "launch.last_call_s=3")
    job = script(tmp_path, slow=True)
    machines = [Machine(tmp_path, number, *quick, script=job, nnodes="2:3") for number in (0, 1, 2)]
    first, *others = machines
    for machine in machines:
        machine.start()
    wait_until(first, lambda: any(event["step"] >= 10 for event in first.events("committed")))
    newest = max(log["step"] for log in first.events("log"))
    os.kill(first.runner_pid(), signal.SIGKILL)
    first.finish()

    leader = next_leader(others)
    (change,) = leader.events("leader_changed")
    assert (change["node"], change["epoch"]) == (leader.number, 2)
    wait_until(leader, lambda: any(event["time"] > change["time"] for event in leader.events("log")))
    (resumed,) = [event for event in leader.events("resumed") if event["time"] > change["time"]]
    assert resumed["source"] == "memory" and resumed["step"] >= newest - 1

    # It commits now, which only the first node did.
    wait_until(leader, lambda: bool(leader.events("committed")))

    # A new machine has the lost one's node rank.
    shutil.rmtree(first.folder)
    first.start()
    wait_until(leader, lambda: any(event["came"] == [0] for event in leader.events("nodes_changed")))
    changed_at = leader.events("nodes_changed")[-1]["time"]
    wait_until(leader, lambda: any(log["time"] > changed_at for log in leader.events("log")))
    assert not first.events("leader_changed") and not first.events("fetched")

    # The new leader is preempted: it saves, leaves, and one of the two others leads at once.
    leader.signal(signal.SIGTERM)
    assert leader.finish() == 75, outputs(machines)
    (last,) = leader.events("attempt_ended")[-1:]
    assert last["kind"] == "preempted" and last["step"] == leader.events("committed")[-1]["step"]
    left = [machine for machine in machines if machine is not leader]
    leader = next_leader(left)
    (change,) = leader.events("leader_changed")
    assert change["epoch"] == 3
    wait_until(leader, lambda: any(event["time"] > change["time"] for event in leader.events("log")))
    (resumed,) = [event for event in leader.events("resumed") if event["time"] > change["time"]]
    assert (resumed["source"], resumed["step"]) == ("memory", last["step"])
    (tmp_path / "hf.fast").touch()
    assert [machine.finish() for machine in left] == [0, 0], outputs(machines)

    ours, theirs = loss_curve(first.checkpoint(STEPS)), loss_curve(calm.checkpoint(STEPS))
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=1e-5)
    assert_nobody_is_left(machines)
