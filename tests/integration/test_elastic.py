"""A run whose nodes come and go, its leader included: three network namespaces, `--nnodes 2:3`, one rank each."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers.machines import Machine, assert_nobody_is_left, outputs
from integration.support import finished_once, loss_curve, shared_folder, troubled, wait_until

# Of the whole test, and of the short one.
STEPS = {True: 120, False: 60}
# Slow until the test says otherwise, at any step and in any attempt.
SLOW = """
    def at_step(step, args):
        if ATTEMPTS_ARE_SLOW and not os.path.exists(args.output_dir + ".fast"):
            time.sleep(0.25 if step < STEPS // 4 else 1 if step < STEPS * 2 // 3 else 3)
"""


def script(folder: Path, steps: int, *, slow: bool) -> list[str]:
    """Without dropout, whose masks depend on the number of ranks."""
    (name,) = troubled(folder, SLOW.replace("ATTEMPTS_ARE_SLOW", str(slow)).replace("STEPS", str(steps)))
    path = Path(name)
    path.write_text(
        path.read_text()
        .replace("max_steps=40", f"max_steps={steps}")
        .replace("dropout=0.2", "dropout=0.0")
        # Three samples of a step: of two ranks, one computes a filler.
        .replace("per_device_train_batch_size=4", "per_device_train_batch_size=1")
    )
    return [name]


def wait_for_step(leader: Machine, at: float) -> None:
    """Wait for a step that ends after this time."""
    wait_until(leader, lambda: any(log["time"] > at for log in leader.events("log")))


def wait_for_change(leader: Machine, came: list[int], gone: list[int]) -> None:
    """Wait until the nodes have changed in this way, and the attempt with the new ones takes steps."""

    def changes() -> list[float]:
        return [
            change["time"]
            for change in leader.events("nodes_changed")
            if (change["came"], change["gone"]) == (came, gone)
        ]

    wait_until(leader, lambda: bool(changes()))
    wait_for_step(leader, changes()[-1])


def next_leader(machines: list[Machine], epoch: int) -> Machine:
    """Wait until one of the machines leads, from its own memory, and return it."""

    def found() -> list[Machine]:
        return [machine for machine in machines if machine.events("leader_changed")]

    wait_until(machines[0], lambda: bool(found()))
    (leader,) = found()
    (change,) = leader.events("leader_changed")
    assert (change["node"], change["epoch"]) == (leader.number, epoch)
    wait_for_step(leader, change["time"])
    (resumed,) = [event for event in leader.events("resumed") if event["time"] > change["time"]]
    assert resumed["source"] == "memory"
    return leader


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_nodes_are_lost_come_back_and_leave(
    whole: bool, wire: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    steps = STEPS[whole]
    folder = shared_folder(tmp_path_factory) / f"calm-elastic-{steps}"
    calm = finished_once(folder / "run", "--nproc-per-node", "3", script=lambda: script(folder, steps, slow=False))
    quick = ("--set", "launch.grow_interval_s=0", "--set", "launch.last_call_s=3")
    job = script(tmp_path, steps, slow=True)
    machines = [Machine(tmp_path, number, *quick, script=job, nnodes="2:3") for number in (0, 1, 2)]
    first, second, third = machines
    for machine in machines:
        machine.start()
    wait_until(first, lambda: any(event["step"] >= 10 for event in first.events("committed")))

    # A machine is lost: the others continue from their own memory, and lose no more than the step under way.
    os.kill(third.runner_pid(), signal.SIGKILL)
    third.finish()
    wait_for_change(first, [], [2])
    (lost,) = first.events("attempt_ended")
    (resumed,) = first.events("resumed")
    assert lost["kind"] == "node lost"
    assert resumed["source"] == "memory" and resumed["step"] >= lost["step"] - 1

    # It is back, with an empty disk: the others pause at a step, and it receives the state from them.
    shutil.rmtree(third.folder)
    third.start()
    wait_for_change(first, [2], [])
    end = first.events("attempt_ended")[-1]
    assert end["kind"] == "nodes changed"
    assert (first.events("resumed")[-1]["step"], first.events("resumed")[-1]["source"]) == (end["step"], "memory")
    assert not third.events("fetched")

    # The leader is lost for good: another one leads, and commits, which only the first node did.
    wait_until(first, lambda: first.events("snapshot")[-1]["step"] > end["step"])
    os.kill(first.runner_pid(), signal.SIGKILL)
    first.finish()
    others = [second, third]
    leader = next_leader(others, 2)
    assert leader.events("resumed")[-1]["step"] > end["step"]
    wait_until(leader, lambda: bool(leader.events("committed")))
    left = others

    if whole:
        # A new machine has the lost one's node rank, and follows.
        shutil.rmtree(first.folder)
        first.start()
        wait_for_change(leader, [0], [])
        assert not first.events("leader_changed") and not first.events("fetched")

        # The leader is preempted: it saves, leaves, and one of the two others leads at once.
        leader.signal(signal.SIGTERM)
        assert leader.finish() == 75, outputs(machines)
        last = leader.events("attempt_ended")[-1]
        assert last["kind"] == "preempted" and last["step"] == leader.events("committed")[-1]["step"]
        left = [machine for machine in machines if machine is not leader]
        assert next_leader(left, 3).events("resumed")[-1]["step"] == last["step"]
    (tmp_path / "hf.fast").touch()
    assert [machine.finish() for machine in left] == [0, 0], outputs(machines)

    # The samples of every step were those of the undisturbed run; their sum has another order.
    ours, theirs = (loss_curve(run.checkpoint(steps)) for run in (left[0], calm))
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=1e-5)
    assert_nobody_is_left(machines)
