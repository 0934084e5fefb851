"""What each fault does to which nodes, without a process."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from runner.chaos.network import Wire
from runner.chaos.node_faults import NODE_FAULTS, FaultViolation
from runner.chaos.scene import NotApplicable
from runner.errors import ExitCode

BY_NAME = {fault.name: fault for fault in NODE_FAULTS}


class Process:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def kill(self) -> None:
        self._log.append(f"SIGKILL {self._name}")


class Node:
    def __init__(self, rank: int, log: list[str], *, alive: bool = True) -> None:
        self.rank, self.is_alive, self._log, self.clock = rank, alive, log, "no compiler"
        self.run = SimpleNamespace(
            refresh=lambda: None,
            rank=lambda: Process(log, f"rank on {rank}"),
            helper=lambda module: Process(log, f"{module} on {rank}"),
            process=SimpleNamespace(pid=100 + rank),
        )

    def kill(self) -> None:
        self._log.append(f"power {self.rank}")

    def start(self) -> None:
        self._log.append(f"start {self.rank}")


class Network:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def set_wires(self, host: int, wire: Wire, *, inbound: bool = True, outbound: bool = True) -> None:
        self._log.append(f"wires {host} {wire.cut} {wire.delay_s > 0} {wire.loss > 0} in={inbound} out={outbound}")


class Cluster:
    """Nodes 0 and 1 run, 2 does not; 1 leads."""

    def __init__(self, codes: tuple[int | None, ...] = (75,)) -> None:
        self.log: list[str] = []
        self.nodes = [Node(0, self.log), Node(1, self.log), Node(2, self.log, alive=False)]
        self.network: Network | None = Network(self.log)
        self.tiers = SimpleNamespace(durable=SimpleNamespace(root="/store"))
        self._codes = codes

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.is_alive]

    @property
    def absent(self) -> list[Node]:
        return [node for node in self.nodes if not node.is_alive]

    @property
    def leader(self) -> Node | None:
        return self.nodes[1] if self.nodes[1].is_alive else None

    def replace(self, node: Node) -> None:
        self.log.append(f"replace {node.rank}")

    def stop(self, nodes: list[Node], limit_s: float) -> list[int | None]:
        self.log.append(f"SIGTERM {[node.rank for node in nodes]}")
        return [*self._codes, *[75] * len(nodes)][: len(nodes)]


def inject(name: str, cluster: Cluster, seed: int = 1) -> list[str]:
    any_cluster: Any = cluster
    assert BY_NAME[name].inject(any_cluster, Random(seed))
    return cluster.log


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.chaos.node_faults.time.sleep", lambda seconds: None)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(NODE_FAULTS)


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("kill the leader's machine", ["power 1"]),
        ("preempt the leader", ["SIGTERM [1]"]),
        ("stop all nodes", ["SIGTERM [0, 1]"]),
        ("start a node", ["start 2"]),
        ("replace a machine", ["replace 2"]),
    ],
)
def test_whom_a_fault_meets(name: str, log: list[str]) -> None:
    assert inject(name, Cluster()) == log


@pytest.mark.parametrize("seed", range(5))
def test_a_victim_runs(seed: int) -> None:
    assert inject("kill a machine", Cluster(), seed)[0] in ("power 0", "power 1")
    assert inject("kill a rank", Cluster(), seed)[0] in ("SIGKILL rank on 0", "SIGKILL rank on 1")
    assert inject("kill a helper", Cluster(), seed)[0].startswith("SIGKILL ")
    assert inject("preempt a node", Cluster(), seed)[0] in ("SIGTERM [0]", "SIGTERM [1]")


def test_wires_are_mended_afterwards() -> None:
    for name, kind in (
        ("cut a node off", "True False False"),
        ("delay frames", "False True"),
        ("lose frames", "False False True"),
    ):
        during, after = inject(name, Cluster())
        assert kind in during and after.endswith("False False False in=True out=True")
    directions = {inject("cut one direction", Cluster(), seed)[0].split("False False ")[1] for seed in range(9)}
    assert directions == {"in=True out=False", "in=False out=True"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kill two machines", "fewer than three"),
        ("cut a node off", "no network"),
        ("clock of a node jumps", "no compiler"),
        ("start a node", "all nodes run"),
        ("preempt the leader", "nobody leads"),
    ],
)
def test_what_cannot_be_done_says_why(name: str, reason: str) -> None:
    cluster = Cluster()
    if reason == "no network":
        cluster.network = None
    if reason == "all nodes run":
        cluster.nodes[2].is_alive = True
    if reason == "nobody leads":
        cluster.nodes[1].is_alive = False
    with pytest.raises(NotApplicable, match=reason):
        inject(name, cluster)


class Commands:
    """Commands that a test records; those that name `failing` fail."""

    def __init__(self, failing: str = "") -> None:
        self.done: list[str] = []
        self._failing = failing

    def run(self, command: list[str], **_: Any) -> Any:
        self.done.append(" ".join(command))
        failed = bool(self._failing) and self._failing in command
        return SimpleNamespace(returncode=int(failed), stderr="mount: permission denied")


def test_storage_is_read_only_for_one_node_and_writable_again(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands()
    monkeypatch.setattr("runner.chaos.node_faults.subprocess.run", commands.run)
    inject("storage read-only for a node", Cluster())
    (own,) = {command.partition(" -- ")[0] for command in commands.done}
    assert own in ("nsenter --mount=/proc/100/ns/mnt", "nsenter --mount=/proc/101/ns/mnt")
    assert [command.partition(" -- ")[2] for command in commands.done] == [
        "mount --bind /store /store",
        "mount -o remount,bind,ro /store",
        "umount --lazy /store",
    ]


@pytest.mark.parametrize("reason", ["not a folder", "no network", "permission denied", "nsenter is missing"])
def test_storage_that_cannot_be_locked_says_why(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.tiers.durable.root = None if reason == "not a folder" else "/store"
    if reason == "no network":
        cluster.network = None

    def missing(command: list[str], **_: Any) -> Any:
        raise FileNotFoundError(2, "No such file", command[0])

    run = missing if "missing" in reason else Commands("remount,bind,ro").run
    monkeypatch.setattr("runner.chaos.node_faults.subprocess.run", run)
    with pytest.raises(NotApplicable, match=reason):
        inject("storage read-only for a node", cluster)


@pytest.mark.parametrize("code", [None, 1, 76, -9])
def test_a_stop_that_ends_otherwise_is_a_violation(code: int | None) -> None:
    with pytest.raises(FaultViolation, match=f"0: {code}"):
        inject("stop all nodes", Cluster((code,)))
    inject("stop all nodes", Cluster((int(ExitCode.DONE),)))
