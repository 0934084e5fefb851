"""A run on two machines: two network namespaces, a wire between them, a shared volume, and nothing else in common."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.machines import (
    END,
    PORT,
    Machine,
    assert_nobody_is_left,
    finish,
    kinds,
    outputs,
    pair,
    start,
    wait_for_commit,
)
from helpers.wire import Cut
from integration.support import Run, finished_once, shared_folder, state_hash, troubled, wait_for_events, wait_until

from runner.chaos.network import address_of, inside


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks on one machine, undisturbed."""
    folder = shared_folder(tmp_path_factory) / "calm"
    return finished_once(folder / "run", script=lambda: troubled(folder))


@pytest.mark.soak
def test_a_rank_that_dies_on_one_machine_restarts_all(wire: None, calm: Run, tmp_path: Path) -> None:
    machines = pair(tmp_path, crawl=10)
    start(machines)
    wait_for_commit(machines, 10)
    killed_at = time.time()
    os.kill(machines[1].rank_pid(1), signal.SIGKILL)
    assert finish(machines) == [0, 0], outputs(machines)
    assert kinds(machines[0]) == ["crashed", "finished"]
    cause = machines[0].events("attempt_ended")[0]
    assert cause["rank"] == 1 and "killed" in str(cause["cause"])
    # Before the time-out of the collective.
    assert float(str(cause["time"])) - killed_at < 120
    # Both machines held the snapshot in memory.
    assert [event["source"] for event in machines[0].events("resumed")] == ["memory"]
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)


@pytest.mark.soak
@pytest.mark.parametrize("away_s", [20, 60])
def test_a_wire_that_is_cut_and_restored_later(away_s: float, cut: Cut, calm: Run, tmp_path: Path) -> None:
    machines = pair(tmp_path, crawl=10)
    start(machines)
    wait_for_commit(machines, 10)
    cut.now()
    cut_at = time.monotonic()
    for machine in machines:
        wait_for_events(machine, "attempt_ended")
    assert time.monotonic() - cut_at < 120
    wait_until(machines[0], lambda: time.monotonic() - cut_at > away_s)
    cut.restore()
    assert finish(machines) == [0, 0], outputs(machines)
    assert kinds(machines[0]) == ["node lost", "finished"]
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_the_first_machine_is_lost_and_comes_back(wire: None, calm: Run, tmp_path: Path) -> None:
    machines = pair(tmp_path, crawl=10)
    start(machines)
    wait_for_commit(machines, 10)
    os.kill(machines[0].runner_pid(), signal.SIGKILL)
    machines[0].finish()
    wait_until(machines[1], lambda: machines[1].events("attempt_ended"))
    assert kinds(machines[1]) == ["node lost"]
    machines[0].start()
    assert finish(machines) == [0, 0], outputs(machines)
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)


# Of the leader's last twenty steps, those that are tried by default.
TRIED = (1,)


def killed_leader(machine: Machine, trace: Path, *kill: str) -> Machine:
    """The same command, which writes down its steps, and is killed before one of them."""
    at = machine.command.index("start")
    program = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "killed_leader.py"), str(trace), *kill, "--"]
    machine.command[at - 1 : at] = program
    return machine


@pytest.fixture(scope="module")
def steps(wire: None, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a leader that nobody kills, in order."""
    folder = tmp_path_factory.mktemp("steps")
    machines = pair(folder)
    killed_leader(machines[0], folder / "trace")
    start(machines)
    assert finish(machines) == [0, 0], outputs(machines)
    return (folder / "trace").read_text().splitlines()


@pytest.mark.xdist_group("leader")
@pytest.mark.parametrize(
    "last", [pytest.param(last, marks=[] if last in TRIED else [pytest.mark.soak]) for last in range(1, 21)]
)
def test_a_leader_killed_at_one_of_its_last_steps(
    last: int, steps: list[str], wire: None, calm: Run, tmp_path: Path
) -> None:
    """`finish` was sent before the last commit: the other node left for good, and the next leader waited for ever."""
    name = steps[-last]
    machines = pair(tmp_path)
    command = list(machines[0].command)
    killed_leader(machines[0], tmp_path / "trace", name, str(steps[: len(steps) - last + 1].count(name)))
    start(machines)
    assert machines[0].finish() == -signal.SIGKILL, f"{name}: not reached\n{machines[0].output}"
    began = time.monotonic()
    machines[0].command = command
    machines[0].start()
    assert finish(machines) == [0, 0], f"{name}\n{outputs(machines)}"
    # Before launch.rendezvous_timeout_s has passed.
    assert time.monotonic() - began < 300
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_the_other_machine_is_lost_at_the_very_end(wire: None, tmp_path: Path) -> None:
    """The restarted node finds no leader: the first node has already exited for good."""
    machines = pair(tmp_path)
    start(machines)
    assert finish(machines) == [0, 0], outputs(machines)
    assert machines[1].start().finish() == 0, machines[1].output
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_both_machines_are_lost_and_come_back(wire: None, calm: Run, tmp_path: Path) -> None:
    """At once, with all that ran there; the second one is back first, and waits."""
    machines = pair(tmp_path, crawl=20)
    start(machines)
    wait_for_commit(machines, 20)
    for machine in machines:
        os.kill(machine.runner_pid(), signal.SIGSTOP)
    for machine in machines:
        for process in [psutil.Process(machine.runner_pid()), *machine.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        machine.finish()
    machines[1].start()
    time.sleep(5)
    machines[0].start()
    assert finish(machines) == [0, 0], outputs(machines)
    assert machines[0].events("training_started")[-1]["step"] >= 20
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_a_machine_that_does_not_come_back(wire: None, tmp_path: Path) -> None:
    """Every wait is bounded, on both sides."""
    machines = pair(tmp_path, "--set", "launch.rendezvous_timeout_s=15", crawl=10)
    start(machines)
    wait_for_commit(machines, 10)
    os.kill(machines[1].runner_pid(), signal.SIGKILL)
    machines[1].finish()
    assert machines[0].finish() == 76, machines[0].output
    assert "node 1 of 2 has not connected within 15 s" in machines[0].output
    assert machines[1].start().finish() == 76
    assert "the leader at 10.99.0.1:" in machines[1].output
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_a_stop_on_any_machine_stops_all_at_one_step(wire: None, calm: Run, tmp_path: Path) -> None:
    machines = pair(tmp_path, crawl=8)
    start(machines)
    wait_for_commit(machines, 10)
    machines[1].signal(signal.SIGTERM)
    assert finish(machines) == [75, 75], outputs(machines)
    stopped = {event["step"] for machine in machines for event in machine.events("attempt_ended")}
    assert stopped == {machines[0].events("committed")[-1]["step"]}
    start(machines)
    assert finish(machines) == [0, 0], outputs(machines)
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)


def test_a_bad_node_alone_ends_as_one(wire: None, tmp_path: Path) -> None:
    """Both ended with 80: the cluster counted two failures, and moved a healthy node, too."""
    trouble = """
        if RANK == 1:
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    """
    machines = pair(tmp_path, trouble=trouble)
    start(machines)
    assert finish(machines) == [75, 80], outputs(machines)
    assert "node 1 is at fault" in machines[0].output and "ECC error" in machines[0].output
    assert "this node is at fault" in machines[1].output
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_an_error_that_would_come_again_ends_all_with_one_code(wire: None, tmp_path: Path) -> None:
    trouble = """
        if RANK == 1:
            import no_such_module
    """
    machines = pair(tmp_path, trouble=trouble)
    start(machines)
    assert finish(machines) == [78, 78], outputs(machines)
    for machine in machines:
        # Also the last line of the one that leads nobody.
        assert (
            "no_such_module" in machine.output.splitlines()[-1] and "(exit code 78" in machine.output.splitlines()[-1]
        )
    assert_nobody_is_left(machines)


@pytest.mark.soak
def test_memory_runs_out_on_one_machine_and_all_cut_their_batches(wire: None, tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            with open(FOLDER + f".{RANK}", "a") as file:
                print(args.per_device_train_batch_size, args.gradient_accumulation_steps, file=file)
            if step == 12 and RANK == 1 and args.per_device_train_batch_size == 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
    """
    machines = pair(tmp_path, trouble=trouble)
    start(machines)
    assert finish(machines) == [0, 0], outputs(machines)
    assert kinds(machines[0]) == ["out of memory", "finished"]
    assert [(tmp_path / f"hf.{rank}").read_text().split()[-2:] for rank in (0, 1)] == [["2", "2"]] * 2


# What a host that knows the protocol but not the secret can do: connect, wait, send garbage, forged messages and lines
# without an end, again and again until the run has ended.
STRANGER = """
import os, socket, sys, time
address, proof = (sys.argv[1], int(sys.argv[2])), b"ab" * 32
FORGED = [b'{"do": "stop", "reason": "says a stranger"}', b'{"do": "hello", "node_rank": 1}', b"proof " + proof,
          b"proof " + proof + b" " + proof, os.urandom(200), b"x" * 100_000, b""]
count, held = 0, []
while True:
    try:
        held.append(socket.create_connection(address, 5))
        held[-1].sendall(FORGED[count % len(FORGED)] + b"\\n" * (count % 2))
    except OSError:
        pass
    count += 1
    if count % 100 == 0:
        print(count, flush=True)
        time.sleep(0.05)
    if len(held) > 500:
        held.pop(0).close()
"""


@pytest.mark.soak
def test_strangers_neither_stop_nor_grow_a_run(wire: None, calm: Run, tmp_path: Path) -> None:
    machines = pair(tmp_path, crawl=10)
    start(machines)
    wait_for_commit(machines, 10)
    leader = psutil.Process(machines[0].runner_pid())
    before = leader.memory_info().rss
    command = inside(1, [sys.executable, "-c", STRANGER, address_of(0), str(PORT + 1)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        try:
            while int(stranger.stdout.readline()) < 2000:
                assert machines[0].process is not None and machines[0].process.poll() is None, machines[0].output
            grown = leader.memory_info().rss - before
            assert finish(machines) == [0, 0], outputs(machines)
        finally:
            stranger.kill()
    assert grown < 10_000_000
    assert kinds(machines[0]) == ["finished"]
    assert machines[0].output.count("refused a connection from 10.99.0.2") == 1
    assert state_hash(machines[0].checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert_nobody_is_left(machines)
