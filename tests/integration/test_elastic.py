"""A run whose nodes come and go: three network namespaces, `--nnodes 2:3`, one rank each."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from integration.support import finished_once, loss_curve, shared_folder, troubled, wait_until
from machines import Machine, assert_nobody_is_left, outputs

STEPS = 120
# Slow until the test says otherwise, at any step and in any attempt.
SLOW = """
    def at_step(step, args):
        if ATTEMPTS_ARE_SLOW and not os.path.exists(args.output_dir + ".fast"):
            time.sleep(0.25 if step < 60 else 1 if step < 100 else 3)
"""


def script(folder: Path, *, slow: bool) -> list[str]:
    """Without dropout, whose masks depend on the number of ranks."""
    (name,) = troubled(folder, SLOW.replace("ATTEMPTS_ARE_SLOW", str(slow)))
    path = Path(name)
    path.write_text(
        path.read_text().replace("max_steps=40", f"max_steps={STEPS}").replace("dropout=0.2", "dropout=0.0")
    )
    return [name]


def admitted(machines: list[Machine], count: int) -> None:
    """Until the nodes have changed so often, and the attempt with the new ones takes steps."""
    leader = machines[0]

    def begun() -> bool:
        changes = leader.events("nodes_changed")
        return len(changes) >= count and any(log["time"] > changes[-1]["time"] for log in leader.events("log"))

    wait_until(leader, begun)


def test_nodes_are_lost_come_back_and_leave(
    wire: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shared_folder(tmp_path_factory) / "calm-elastic"
    calm = finished_once(folder / "run", "--nproc-per-node", "3", script=lambda: script(folder, slow=False))
    quick = ("--set", "launch.grow_interval_s=0")
    job = script(tmp_path, slow=True)
    machines = [Machine(tmp_path, number, *quick, script=job, nnodes="2:3") for number in (0, 1, 2)]
    leader, stays, leaves = machines
    for machine in machines:
        machine.start()
    wait_until(leader, lambda: any(event["step"] >= 10 for event in leader.events("committed")))

    # A machine is lost: the others continue from their own memory, and lose no more than the step under way.
    os.kill(leaves.runner_pid(), signal.SIGKILL)
    leaves.finish()
    admitted(machines, 1)
    (lost,) = leader.events("attempt_ended")
    assert lost["kind"] == "node lost"
    (resumed,) = leader.events("resumed")
    assert resumed["source"] == "memory" and resumed["step"] >= lost["step"] - 1

    # It is back, with an empty disk: the others pause at a step, and continue with it.
    shutil.rmtree(leaves.folder)
    leaves.start()
    admitted(machines, 2)
    assert [end["kind"] for end in leader.events("attempt_ended")] == ["node lost", "nodes changed"]
    assert leader.events("resumed")[-1]["step"] == leader.events("attempt_ended")[-1]["step"]
    # Its state came from the others.
    assert leader.events("resumed")[-1]["source"] == "memory" and not leaves.events("fetched")

    # It is preempted: that costs this node only.
    leaves.signal(signal.SIGTERM)
    assert leaves.finish() == 75, outputs(machines)
    admitted(machines, 3)
    (tmp_path / "hf.fast").touch()
    assert [leader.finish(), stays.finish()] == [0, 0], outputs(machines)

    changes = [(event["nodes"], event["came"], event["gone"]) for event in leader.events("nodes_changed")]
    assert changes == [([0, 1], [], [2]), ([0, 1, 2], [2], []), ([0, 1], [], [2])]
    assert [event["nnodes"] for event in leader.events("attempt_started")] == [3, 2, 3, 2]
    # The samples of every step were those of the undisturbed run; their sum has another order.
    ours, theirs = (loss_curve(run.checkpoint(STEPS)) for run in (leader, calm))
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=1e-5)
    assert_nobody_is_left(machines)
