"""What can happen to the nodes of a run, and to the network between them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import psutil

from runner.chaos.cluster import Cluster, ClusterNode
from runner.chaos.network import Network, Wire
from runner.chaos.sandbox import Clock
from runner.chaos.scene import NotApplicable
from runner.errors import ExitCode

_STOP_LIMIT_S = 120.0


class FaultViolation(Exception):
    """What happened while the fault was injected must not; the text says what."""


@dataclass(frozen=True)
class NodeFault:
    """A kind of fault; `inject` returns what was done, in words, or raises NotApplicable or FaultViolation."""

    name: str
    inject: Callable[[Cluster, Random], str]


def _kill(cluster: Cluster, dice: Random) -> str:
    return _killed(cluster, [dice.choice(cluster.alive)])


def _kill_leader(cluster: Cluster, dice: Random) -> str:
    return _killed(cluster, [_leader(cluster)])


def _kill_several(cluster: Cluster, dice: Random) -> str:
    if len(cluster.alive) < 3:
        raise NotApplicable("fewer than three nodes run")
    return _killed(cluster, dice.sample(cluster.alive, 2))


def _killed(cluster: Cluster, victims: list[ClusterNode]) -> str:
    for node in victims:
        node.kill()
    return f"machine {_named(victims)} lost power"


def _kill_rank(cluster: Cluster, dice: Random) -> str:
    node = dice.choice(cluster.alive)
    node.run.refresh()
    process = node.run.rank()
    if process is None:
        raise NotApplicable("no rank runs on the chosen node")
    return _end(process, f"a rank of node {node.rank}")


def _kill_helper(cluster: Cluster, dice: Random) -> str:
    node, module = dice.choice(cluster.alive), dice.choice(["checkpointing.agent", "runner.launcher.launcher"])
    process = node.run.helper(module)
    if process is None:
        raise NotApplicable("no helper runs on the chosen node")
    return _end(process, f"{module} of node {node.rank}")


def _end(process: psutil.Process, what: str) -> str:
    try:
        process.kill()
    except psutil.Error:
        raise NotApplicable("the process had ended") from None
    return f"SIGKILL of {what}"


def _preempt(cluster: Cluster, dice: Random) -> str:
    return _stopped(cluster, [dice.choice(cluster.alive)])


def _preempt_leader(cluster: Cluster, dice: Random) -> str:
    return _stopped(cluster, [_leader(cluster)])


def _stop_all(cluster: Cluster, dice: Random) -> str:
    return _stopped(cluster, cluster.alive)


def _stopped(cluster: Cluster, nodes: list[ClusterNode]) -> str:
    codes = cluster.stop(nodes, _STOP_LIMIT_S)
    # A run may end while it is being stopped.
    if any(code not in (ExitCode.PREEMPTED, ExitCode.DONE) for code in codes):
        ends = ", ".join(f"{node.rank}: {code}" for node, code in zip(nodes, codes, strict=True))
        raise FaultViolation(f"SIGTERM ended nodes with other codes than 75 ({ends})")
    return f"SIGTERM to node {_named(nodes)}"


def _start(cluster: Cluster, dice: Random) -> str:
    node = _absent(cluster, dice)
    node.start()
    return f"node {node.rank} came back"


def _replace(cluster: Cluster, dice: Random) -> str:
    node = _absent(cluster, dice)
    cluster.replace(node)
    return f"a new machine with an empty disk came as node {node.rank}"


def _absent(cluster: Cluster, dice: Random) -> ClusterNode:
    if not cluster.absent:
        raise NotApplicable("all nodes run")
    return dice.choice(cluster.absent)


def _cut(cluster: Cluster, dice: Random) -> str:
    return _with_wires(cluster, dice, Wire(cut=True), dice.uniform(0.5, 15), "was cut off")


def _cut_one_way(cluster: Cluster, dice: Random) -> str:
    inbound = dice.random() < 0.5
    what = "could hear nobody" if inbound else "was heard by nobody"
    return _with_wires(
        cluster, dice, Wire(cut=True), dice.uniform(0.5, 15), what, inbound=inbound, outbound=not inbound
    )


def _delay(cluster: Cluster, dice: Random) -> str:
    delay_s = dice.uniform(0.02, 0.5)
    return _with_wires(
        cluster, dice, Wire(delay_s=delay_s), dice.uniform(1, 6), f"had delays of {1000 * delay_s:.0f} ms"
    )


def _lose_frames(cluster: Cluster, dice: Random) -> str:
    share = dice.uniform(0.01, 0.2)
    return _with_wires(cluster, dice, Wire(loss=share), dice.uniform(1, 6), f"lost {share:.0%} of its frames")


def _with_wires(cluster: Cluster, dice: Random, wire: Wire, seconds: float, what: str, **directions: bool) -> str:
    network, node = _network(cluster), dice.choice(cluster.nodes)
    network.set_wires(node.rank, wire, **directions)
    try:
        time.sleep(seconds)
    finally:
        network.set_wires(node.rank, Wire())
    return f"node {node.rank} {what} for {seconds:.1f} s"


def _network(cluster: Cluster) -> Network:
    if cluster.network is None:
        raise NotApplicable("the nodes have no network of their own")
    return cluster.network


def _pause_leader(cluster: Cluster, dice: Random) -> str:
    node, seconds = _leader(cluster), dice.uniform(1, 20)
    process = psutil.Process(node.run.process.pid)
    try:
        process.suspend()
        time.sleep(seconds)
        process.resume()
    except psutil.Error:
        raise NotApplicable("the runner had ended") from None
    return f"the runner of node {node.rank}, which led, stood still for {seconds:.1f} s"


def _jump(cluster: Cluster, dice: Random) -> str:
    node = dice.choice(cluster.alive)
    if not isinstance(node.clock, Clock):
        raise NotApplicable(node.clock)
    seconds = dice.choice([-3600, 3600])
    node.clock.set(seconds)
    time.sleep(3)
    node.clock.set(0)
    return f"the clock of node {node.rank} was set by {seconds:+} s, and back after 3 s"


def _lock_storage(cluster: Cluster, dice: Random) -> str:
    """Have a node find its storage read-only: a file server that fails over, a volume that was remounted."""
    node, seconds, root = dice.choice(cluster.alive), dice.uniform(0.5, 10), cluster.tiers.durable.root
    if root is None:
        raise NotApplicable("the storage is not a folder")
    _network(cluster)
    # A process in a network namespace has mounts of its own (ip-netns(8)).
    own = ["nsenter", f"--mount=/proc/{node.run.process.pid}/ns/mnt", "--"]
    _run(*own, "mount", "--bind", str(root), str(root))
    try:
        _run(*own, "mount", "-o", "remount,bind,ro", str(root))
        time.sleep(seconds)
    finally:
        subprocess.run([*own, "umount", "--lazy", str(root)], capture_output=True)
    return f"node {node.rank} could not write to its storage for {seconds:.1f} s"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotApplicable(f"the program {error.filename} is missing") from None
    if done.returncode:
        raise NotApplicable(done.stderr.strip())


def _leader(cluster: Cluster) -> ClusterNode:
    leader = cluster.leader
    if leader is None:
        raise NotApplicable("nobody leads at the moment")
    return leader


def _named(nodes: list[ClusterNode]) -> str:
    return ", ".join(str(node.rank) for node in nodes)


NODE_FAULTS = [
    NodeFault("kill a machine", _kill),
    NodeFault("kill the leader's machine", _kill_leader),
    NodeFault("kill two machines", _kill_several),
    NodeFault("kill a rank", _kill_rank),
    NodeFault("kill a helper", _kill_helper),
    NodeFault("preempt a node", _preempt),
    NodeFault("preempt the leader", _preempt_leader),
    NodeFault("stop all nodes", _stop_all),
    NodeFault("start a node", _start),
    NodeFault("replace a machine", _replace),
    NodeFault("cut a node off", _cut),
    NodeFault("cut one direction", _cut_one_way),
    NodeFault("delay frames", _delay),
    NodeFault("lose frames", _lose_frames),
    NodeFault("pause the leader", _pause_leader),
    NodeFault("clock of a node jumps", _jump),
    NodeFault("storage read-only for a node", _lock_storage),
]
