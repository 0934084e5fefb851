"""What the runner asks of the operating system; every question of it has an answer in the double for unit tests."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest
from helpers.node_fakes import FakeHost

from runner.system import processes
from runner.system.processes import Host


def questions(of: type) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


def test_no_unit_test_with_the_double_reaches_the_operating_system() -> None:
    assert questions(Host) <= questions(FakeHost)


def test_the_state_of_a_process() -> None:
    host = Host()
    assert host.process_state(os.getpid()) in ("R", "S")
    assert host.process_state(2**22 + 1) == "?"


def test_the_clock_never_goes_back() -> None:
    host = Host()
    assert host.monotonic() <= host.monotonic()


class Survivor:
    """A process that ends with the second SIGKILL."""

    pid = 7

    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


def test_processes_are_killed_until_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = Survivor()
    monkeypatch.setattr(processes, "is_running", lambda process: True)
    monkeypatch.setattr(processes, "is_tracker", lambda process: False)
    monkeypatch.setattr("runner.system.processes.psutil.wait_procs", lambda found, timeout: None)
    find: Any = lambda: [victim] if victim.kills < 2 else []  # noqa: E731
    assert Host().kill_all(find) == 1 and victim.kills == 2
    assert Host().kill_all(list) == 0


@pytest.mark.parametrize("adopts_strangers", [True, False])
def test_only_processes_of_a_run_are_its_own(adopts_strangers: bool) -> None:
    """Not what the shell before `exec runner` had started, nor what a container's first process has adopted."""
    plain = {name: value for name, value in os.environ.items() if name != processes.RUN_ID_ENV}
    # One that was there before, and one that came later, as by `kubectl exec`.
    server = ["sh", "-c", "read line; env -i sleep 60 & echo $!; wait"]
    before = subprocess.Popen(server, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host = Host()
    host._adopts_strangers = adopts_strangers
    # What an SSH server starts for a user, as its own child.
    assert before.stdin is not None and before.stdout is not None
    before.stdin.write("\n")
    before.stdin.flush()
    session = int(before.stdout.readline())
    other = subprocess.Popen(["sleep", "60"], env=plain)
    # One that has overwritten its environment, as some name themselves, may hold a GPU.
    bare = subprocess.Popen(["sleep", "60"], env={})
    # A process of a rank, one of whose own has an empty environment.
    script = "env -i sleep 60 & echo $!; wait"
    marked = subprocess.Popen(
        ["sh", "-c", script], env={**plain, processes.RUN_ID_ENV: "run/0"}, stdout=subprocess.PIPE, text=True
    )
    assert marked.stdout is not None
    child = int(marked.stdout.readline())
    try:
        found = {process.pid for process in host.descendants()}
        assert {marked.pid, child, bare.pid} <= found and not {before.pid, session} & found
        # One that a rank has started with an environment of its own, and that has lost its parent.
        assert (other.pid in found) is not adopts_strangers
    finally:
        os.kill(child, signal.SIGKILL)
        os.kill(session, signal.SIGKILL)
        for process in (before, other, bare, marked):
            process.kill()
            process.communicate()


def test_a_time_limit_ends_the_hunt(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = lambda: [Survivor()]  # noqa: E731
    assert Host().kill_all(find, timeout_s=0.0) == 0


def test_processes_that_someone_waits_for_are_not_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr("runner.system.processes.reap_strays", asked.append)
    Host().reap_strays({1, 2})
    assert asked == [{1, 2}]


def test_orphans_that_have_exited_are_reaped_while_an_attempt_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that started a process in each step filled a container's table of processes."""
    host, now = Host(), [1000.0]
    monkeypatch.setattr(host, "monotonic", lambda: now[0])
    orphan, waited_for = (subprocess.Popen(["true"]) for _ in range(2))
    for process in (orphan, waited_for):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    host._looked_at = 0.0
    for _ in range(2):
        # The first look cannot tell it from what somebody is about to wait for; the second one is too early.
        host.reap_old({waited_for.pid})
        assert host.process_state(orphan.pid) == "Z"
    now[0] += 10.0
    host.reap_old({waited_for.pid})
    assert host.process_state(orphan.pid) == "?" and host.process_state(waited_for.pid) == "Z"
    orphan.wait()
    waited_for.wait()
